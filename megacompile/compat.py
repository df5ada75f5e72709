"""Every private torch API, nowhere else: each with the versions it was seen on.

All of them were seen on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import concurrent.futures.process  # noqa: F401  torch does when it captures: late, as main ends
import functools
import inspect
import linecache
import os
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import cached_backends, skip_code
from torch._dynamo.guards import CheckFunctionManager, DeletedGuardManagerWrapper
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import cpp_builder
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import stateless
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

# What tracing raises for operators whose results depend on data, or that have no fake kernel.
UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    NotImplementedError,  # no kernel for what it was given
)
_TRANSFORMS = tuple(
    f"torch.{name}"
    for name in ("_C._functorch", "_functorch.predispatch", "_functorch.eager_transforms")
)

# The nodes that Dynamo writes for grad mode and autocast.
SET_GRAD_ENABLED = torch._C._set_grad_enabled
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast

# The operator that Dynamo writes for torch.utils.checkpoint, and the keywords that are its own.
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
CHECKPOINT_OPTIONS = frozenset(inspect.signature(checkpoint).parameters) | {"preserve_rng_state"}

# What torch.nn.functional.cross_entropy calls.
CROSS_ENTROPY_LOSS: Callable[..., Any] = torch._C._nn.cross_entropy_loss

NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl  # for subclasses that only dispatch

Tensors = Sequence[torch.Tensor]
Optionals = Sequence[torch.Tensor | None]


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes, dtypes and devices but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def functional_mode() -> Iterator[None]:
    """In-place operations on tensors made by `to_functional` become values and are recorded.

    Raises:
        NotImplementedError: an operator has effects in an order (it checks, it prints).
    """
    mode = FunctionalTensorMode(_allow_token_discovery=True)
    with mode:
        yield
    if mode._tokens:
        raise NotImplementedError("it has an operator with side effects, such as a check of data")


def to_functional(value: Any) -> Any:
    """Wrap a tensor for the `functional_mode` that is active; anything else as it is."""
    return to_fun(value)


def from_functional(tensor: Any) -> Any:
    """The value of a wrapped tensor, another object after each change; anything else as it is."""
    return from_fun(tensor) if isinstance(tensor, FunctionalTensor) else tensor


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory; valid while one of them lives."""
    return hash(StorageWeakRef(tensor.untyped_storage()))


def trace(
    function: Callable[..., Any],
    primals: Tensors,
    tangents: Tensors,
    decompositions: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """Trace `function(primals, tangents)` to ATen; placeholders are primals_1.., tangents_1.."""

    def joint(primals: Tensors, tangents: Tensors) -> Any:  # the partitioner reads these names
        return function(primals, tangents)

    with torch.autograd.set_detect_anomaly(False):  # it reads values, which are not there yet
        traced = make_fx(joint, decomposition_table=decompositions)(list(primals), list(tangents))
    return flatten_signature(traced)


def flatten_signature(module: fx.GraphModule) -> fx.GraphModule:
    """Give a traced function of two lists a flat signature and a flat output."""
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    output = next(iter(reversed(graph.nodes)))
    flat: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                collect(item)
        else:
            flat.append(value)

    collect(output.args[0])
    output.args = (tuple(flat),)
    module.recompile()
    return module


def eager_decompositions() -> dict[Any, Callable[..., Any]]:
    """For operators whose functional form gives other numbers than the in-place form does."""
    return {torch.ops.aten.bernoulli.p: _bernoulli}


def _bernoulli(like: torch.Tensor, p: float, generator: Any = None) -> Any:
    """Draw in the order of `like`'s memory, as `bernoulli_` does: the mask of a dropout."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    if generator is not None or order == list(range(like.dim())):
        return NotImplemented
    drawn = torch.bernoulli(like.permute(order), p)
    return drawn.permute([order.index(d) for d in range(like.dim())])


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor is written for."""
    return dict(select_decomp_table())


def split_joint(
    joint: fx.GraphModule,
    *,
    outputs: int,
    static_primals: Sequence[int],
    memory_budget: float = 1.0,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's min-cut partitioner: (forward returning outputs and saved, backward).

    With a budget below 1 it runs nodes on their fake values, to count what they cost.
    """
    if memory_budget < 1:
        _share_fake_mode(joint)
    with functorch_config.patch(activation_memory_budget=memory_budget):
        return min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=outputs, static_lifetime_input_indices=list(static_primals)
        )


def _share_fake_mode(module: fx.GraphModule) -> None:
    """Give a graph that was traced on real tensors fake values of one mode.

    Seen on torch 2.11 and 2.13: each has a mode of its own, and no operator takes two.
    """
    values = [node.meta.get("val") for node in module.graph.nodes]
    fakes = [v for v in _pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
    if len({id(getattr(value, "fake_mode", None)) for value in fakes}) <= 1:
        return
    with fake_mode():
        for node, value in zip(module.graph.nodes, values, strict=True):
            if value is not None:
                node.meta["val"] = _pytree.tree_map_only(torch.Tensor, _same_looks, value)


def _same_looks(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def mark_must_recompute(node: fx.Node) -> None:
    """Forbid the partitioner to save a node's value for the backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 0


def mark_must_save(node: fx.Node) -> None:
    """Forbid the partitioner to compute a node's value again in the backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = 0


def is_random(node: fx.Node) -> bool:
    """Does an ATen node draw from a generator? Attention with `dropout_p=0` does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "dropout_p":
            given = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p")
            return bool(argument.default_value if given is None else given)
    return True


def compile_inductor(module: fx.GraphModule, inputs: Tensors) -> Callable[..., Any]:
    """Compile an ATen graph with Inductor; `inputs` are fake tensors."""
    compiled: Callable[..., Any] = torch._inductor.compile(module, list(inputs))
    return compiled


def transforms(module: fx.GraphModule) -> str | None:
    """The first node of `torch.func.vmap`, `grad` and their like in a captured graph.

    They count their nesting in global state, which a trace that fails would leave changed.
    """
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                if str(getattr(node.target, "__module__", "")).startswith(_TRANSFORMS):
                    return str(node)
    return None


def module_calls(node: fx.Node) -> list[tuple[int, str]]:
    """The modules a captured node ran in, outermost first: (id of the module, which call of it)."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key in stack:
        module_id, _, call = str(key).partition("@")
        if module_id.isdigit():
            calls.append((int(module_id), call))
    return calls


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf of nested containers, registered classes included."""
    return _pytree.tree_map(function, tree)


def wrapper(cls: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of a wrapper subclass: the looks of `like` on another device, and no data."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=0,
        dtype=like.dtype,
        device=device,
        requires_grad=like.requires_grad,
    )


def is_described() -> bool:
    """Is the caller's property read for a fake tensor to be made like this one?"""
    return sys._getframe(2).f_code.co_name in ("safe_grad", "safe_has_grad")


def gives_views(func: Any) -> bool:
    """Is an ATen operator's result a view of its input, that shares memory with it?"""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def changes_metadata(method: str) -> bool:
    """Does a tensor's method change its shape or strides in place (`squeeze_`)?"""
    if not method.endswith("_") or method.startswith("__"):
        return False
    packet = getattr(torch.ops.aten, method, None)
    if packet is None:
        return False
    tags = [getattr(packet, name).tags for name in packet.overloads()]
    return any(torch.Tag.inplace_view in each for each in tags)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an ATen operator changes in place."""
    given = {
        argument.name: kwargs[argument.name] if argument.name in kwargs else args[i]
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and (argument.name in kwargs or i < len(args))
    }
    return _pytree.tree_leaves(list(given.values()))


# Dynamo captures anew when hooks are added to or removed from a module, and when two parameters
# become one; by default it looks at neither. Nor does it split a graph at the buckets of a
# DistributedDataParallel around: a schedule is for a whole graph.
CALL_OPTIONS = {
    "skip_nnmodule_hook_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "optimize_ddp": False,
}


# What Dynamo's guard filters see of its guards on what a tensor subclass is made of.
SUBCLASS_GUARD = "TENSOR_SUBCLASS_METADATA_MATCH"
INNER_NAMES = ".__tensor_flatten__()[0]"


def dynamo_options() -> dict[str, Any]:
    """What Dynamo's options are now, of those that `CALL_OPTIONS` sets."""
    return {name: getattr(torch._dynamo.config, name) for name in CALL_OPTIONS}


def set_dynamo_options(options: Mapping[str, Any]) -> None:
    """Set what `dynamo_options` gave (on torch 2.13 for this thread)."""
    for name, value in options.items():
        setattr(torch._dynamo.config, name, value)


def outside_inference_mode() -> AbstractContextManager[None]:
    """For its duration, new tensors are ordinary ones. In C: nothing is left where a signal raises.

    `torch.inference_mode(False)` does the same in Python.
    """
    context: AbstractContextManager[None] = torch._C._InferenceMode(False)
    return context


def given_to_functional_call() -> dict[int, Any]:
    """What the `torch.func.functional_call`s around this call have put into modules, by its id."""
    code = stateless._functional_call.__code__
    found: dict[int, Any] = {}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            given = frame.f_locals["parameters_and_buffers"].values()
            found |= {id(value): value for value in given}
        frame = frame.f_back
    return found


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """For its duration, no hooks of the user pack what autograd saves (checkpoint, save_on_cpu)."""
    autograd: Any = torch._C._autograd  # its stubs say that there always is a top
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def keeps_graph() -> bool:
    """Inside a backward: was it called with `retain_graph=True`?"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def accumulator_of(param: torch.Tensor) -> Node:
    """The AccumulateGrad node of a leaf: where autograd's graph ends. It lives while it is held."""
    node: Node = torch.autograd.graph._get_grad_fn_or_grad_acc(param)
    return node


def hooks_of(node: Node) -> tuple[dict[int, Any], dict[int, Any]]:
    """The Python hooks of a node, before and behind it; the dicts follow what is registered.

    Hooks of C++ (those of DistributedDataParallel) are not among them.
    """
    found = []
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(_no_hook)
        found.append(handle.hooks_dict_ref())
        handle.remove()
    return found[0], found[1]


def _no_hook(*gradients: Any) -> None:
    """Shows where hooks are kept."""


def accumulates_into(node: Node) -> bool | None:
    """Inside a backward: will it run this AccumulateGrad node?

    False where `autograd.grad()` or `backward(inputs=...)` were called without its parameter, None
    where `autograd.grad()` was called for it.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it refuses to say of a leaf that autograd.grad() was called for
        return None


@dataclass(eq=False, slots=True)
class BackwardCall:
    """One call of `backward()` or `autograd.grad()`, while it runs."""

    roots: tuple[Any, ...]  # tensors, or gradient edges
    inputs: tuple[Any, ...]  # what it was called for; nothing: every leaf
    users: Any = None  # what was found out about it


def note_backward_calls() -> None:
    """Let `backward_calls` know of every call from now on."""
    stock = torch.autograd.graph._engine_run_backward
    if hasattr(stock, "noted"):
        return

    @functools.wraps(stock)
    def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        call = BackwardCall(tuple(t_outputs), tuple(inputs or ()))
        _BACKWARD_CALLS.append(call)
        try:
            return stock(t_outputs, *args, **kwargs)
        finally:
            _BACKWARD_CALLS.remove(call)
            call.roots = call.inputs = ()  # who still holds the call holds no graph
            call.users = None

    run.noted = True  # type: ignore[attr-defined]
    torch.autograd.graph._engine_run_backward = run
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


def backward_calls() -> tuple[BackwardCall, ...]:
    """The calls that run now, in whatever thread. Autograd's own threads do not know theirs."""
    return tuple(_BACKWARD_CALLS)


_BACKWARD_CALLS: list[BackwardCall] = []


def root_node(root: Any) -> Node:
    """The node of what a backward was called for: a tensor or a gradient edge."""
    if isinstance(root, torch.Tensor):
        return accumulator_of(root)
    node: Node = root.node
    return node


def function_of(node: Node) -> type | None:
    """The `torch.autograd.Function` that a node belongs to; None for one of torch's own."""
    return getattr(node, "_forward_cls", None)


def run_soon(node: Node) -> None:
    """Let autograd run a node as soon as it can, as it does its AccumulateGrad nodes."""
    node._set_sequence_nr(2**63 - 1)  # type: ignore[attr-defined]


def ddp_around() -> torch.nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel whose forward is running."""
    ddp = torch.nn.parallel.DistributedDataParallel
    found: torch.nn.parallel.DistributedDataParallel | None = ddp._get_active_ddp_module()
    return found


def ddp_parameters(
    ddp: torch.nn.parallel.DistributedDataParallel,
) -> list[torch.nn.Parameter]:
    """The parameters that a DistributedDataParallel looks after."""
    return list(ddp._module_parameters)


def check_data_parallel(check: Callable[[dict[str, Any]], None]) -> None:
    """Call `check` with the arguments of every DistributedDataParallel, before it is made."""
    stock = torch.nn.parallel.DistributedDataParallel.__init__
    if hasattr(stock, "checked"):
        return
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        check(signature.bind(self, *args, **kwargs).arguments)
        stock(self, *args, **kwargs)

    init.checked = True  # type: ignore[attr-defined]
    torch.nn.parallel.DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def in_compiled_autograd() -> bool:
    """Inside a backward: does compiled autograd run it?"""
    return bool(torch._dynamo.compiled_autograd.in_compiled_autograd_region)


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Inside a backward: call `callback` in the thread of `backward()`, just before it returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors share this tensor's storage, itself included."""
    storage = tensor.untyped_storage()
    # one user is `storage` itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def free_device_bytes(device: torch.device) -> int:
    """Device memory that this process can still get, within the limit that it was given."""
    if device.type != "cuda":
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = 1.0 if fraction is None else float(fraction(device))
    return min(free, int(share * total) - reserved) + reserved - used


def use_expandable_segments() -> bool:
    """Let segments of the CUDA allocator grow, for the process; False where the user set it up."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    configured = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
    if any(os.environ.get(name) for name in names) or configured():
        return False
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # before torch 2.10
        configure = torch.cuda.memory._set_allocator_settings
    configure("expandable_segments:True")
    return True


def profiler_enabled() -> bool:
    """Is `torch.profiler` recording in this process?"""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def backward_id() -> int:
    """A number that is equal within one call of `backward()`; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def notice_scaled_losses() -> None:
    """Let `loss_is_scaled` know of every loss that a GradScaler scales from now on."""
    stock = torch.amp.GradScaler.scale
    if hasattr(stock, "noticed"):
        return

    def note(gradient: torch.Tensor) -> None:
        del gradient
        _SCALED[:] = [backward_id()]

    @functools.wraps(stock)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = stock(self, outputs)
        for value in _pytree.tree_leaves(scaled) if self.is_enabled() else ():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(note)
        return scaled

    scale.noticed = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def loss_is_scaled() -> bool:
    """Inside a backward: has it come through a loss that a GradScaler scaled?"""
    return backward_id() in _SCALED


_SCALED: list[int] = []  # the last backward that did


def post_accumulate_hooks(param: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The user's `register_post_accumulate_grad_hook` hooks of a parameter."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def gradient_hooks(param: torch.Tensor) -> bool:
    """Did the user `register_hook` on a parameter?"""
    return bool(param._backward_hooks)


def without_torch_function() -> AbstractContextManager[None]:
    """For its duration, tensor subclasses of this thread are treated as plain tensors."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


_C: Any = torch._C  # its stubs leave these out


def torch_function_state() -> Any:
    """Whose `__torch_function__` this thread calls: for `set_torch_function_state`."""
    return _C._get_torch_function_state()


def set_torch_function_state(state: Any) -> None:
    """Set what `torch_function_state` gave, or `NO_SUBCLASSES`."""
    _C._set_torch_function_state(state)


NO_SUBCLASSES = _C._TorchFunctionState.SUBCLASSES_DISABLED  # as in without_torch_function()


_COLLECTIVES = (
    "all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single broadcast gather "
    "recv reduce reduce_scatter reduce_scatter_tensor scatter send"
).split()


def ask_before_collectives(ask: Callable[[Any], None]) -> None:
    """Call `ask` with each tensor that is given to a collective of `torch.distributed`.

    Seen on torch 2.11: they take a tensor subclass for a plain tensor (2.13 asks the subclass).
    Code that has imported one by its name before megacompile was imported calls it as it is.
    """
    if not torch.distributed.is_available():
        return
    for name in _COLLECTIVES:
        stock = getattr(torch.distributed, name)

        @functools.wraps(stock)
        def collective(*args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            for value in _pytree.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    ask(value)
            return stock(*args, **kwargs)

        setattr(torch.distributed, name, collective)
        setattr(torch.distributed.distributed_c10d, name, collective)


def ask_before_export(ask: Callable[[Any], None]) -> None:
    """Call `ask` with each tensor whose memory is exported by DLPack's C functions.

    They take a tensor subclass for a plain tensor. Code that has imported one of them by its name
    before megacompile was imported calls it as it is.
    """
    for module, name in (
        (torch._C, "_to_dlpack"),
        (torch._C, "_to_dlpack_versioned"),
        (torch.utils.dlpack, "to_dlpack"),
        (torch, "to_dlpack"),
    ):
        stock = getattr(module, name)

        @functools.wraps(stock)
        def export(tensor: Any, *args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            ask(tensor)
            return stock(tensor, *args, **kwargs)

        setattr(module, name, export)


def _metadata() -> frozenset[Any]:
    """Functions that look at what a tensor is, not at what it holds."""
    tensor = torch.Tensor
    properties = (
        "shape dtype device layout ndim is_leaf grad_fn requires_grad grad _grad _version _base "
        "output_nr names is_cuda is_cpu is_sparse is_quantized is_meta is_mkldnn is_nested "
        "itemsize nbytes _backward_hooks _post_accumulate_grad_hooks retains_grad grad_dtype"
    )
    methods = (
        "size dim ndimension numel nelement stride storage_offset is_contiguous element_size "
        "is_floating_point is_complex is_signed is_conj is_neg is_inference is_pinned get_device "
        "type __len__ __hash__ register_hook register_post_accumulate_grad_hook retain_grad "
        "requires_grad_ has_names is_same_size is_set_to"
    )
    grad: Any = tensor.grad
    setters = "grad requires_grad _grad grad_dtype _backward_hooks"
    found = [getattr(tensor, name).__get__ for name in properties.split() if hasattr(tensor, name)]
    found += [getattr(tensor, name).__set__ for name in setters.split() if hasattr(tensor, name)]
    found += [getattr(tensor, name) for name in methods.split() if hasattr(tensor, name)]
    return frozenset([*found, grad.__delete__, torch.is_floating_point, torch.is_complex])


METADATA = _metadata()

# What clip_grad_norm_ calls on a list of gradients.
FOREACH_NORM = torch._foreach_norm
FOREACH_MUL = torch._foreach_mul_
FOREACH_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_  # GradScaler.unscale_
FOREACH_ZERO = torch._foreach_zero_  # what zero_grad(set_to_none=False) may call


@contextmanager
def without_sources() -> Iterator[None]:
    """For its duration, torch.fx keeps no source of the graph modules that are made.

    It would keep each for good, though most are gone in a moment: for tracebacks alone.
    """
    sources = fx.graph_module._loader.eval_cache
    before = set(sources)
    try:
        yield
    finally:
        for name in [name for name in sources if name not in before]:
            sources.pop(name, None)
            linecache.cache.pop(name, None)


def forget_compiled(code: types.CodeType, backend: Callable[..., Any]) -> None:
    """Let Dynamo forget what it made of a function that nobody has any more.

    Its guards have finalizers on what lives on (a class, a module); through them, it would keep the
    guards of every model that there ever was, and a reference to each backend.
    """
    frame: Any = torch._C._dynamo.eval_frame
    gone = {id(entry.guard_manager) for entry in frame._debug_get_cache_entry_list(code)}
    torch._dynamo.reset_code(code)  # type: ignore[attr-defined]
    for key, kept in list(cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend:
            del cached_backends[key]
    registry: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer, info in list(registry.items()):
        owner = getattr(getattr(info.func, "func", None), "__self__", None)
        if isinstance(owner, CheckFunctionManager):
            guards = getattr(owner, "guard_manager", None)
            if id(guards) in gone or isinstance(guards, DeletedGuardManagerWrapper):
                finalizer.detach()


def forget_missing() -> None:
    """Let Dynamo forget what it evaluated guards of, where they are on what is not there.

    A guard on `not hasattr(module, "x")` raises when it is evaluated for a filter. That leaves
    the module in a table that every capture shares, for good.
    """
    table = torch._dynamo.guards._get_closure_vars()
    for name in [name for name in table if re.fullmatch(r"tmp\d*", name)]:
        del table[name]


def tracer_around() -> str:
    """What traces this call, where Dynamo does not; "" if nothing does."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    return ""


def in_transform() -> bool:
    """Is a transform of `torch.func` around this call?"""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Is a tensor one of a transform's own, which has no memory?"""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def on_host() -> AbstractContextManager[Any]:
    """For its duration, what names no device is on the CPU, whatever the default device is."""
    if torch.utils._device.CURRENT_DEVICE is None:
        return nullcontext()
    return torch.device("cpu")


def without_torch_compile(model: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile(module)` was called with; any other as it is."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else model


def opaque(
    function: Callable[..., Any],
    *,
    reason: str = "it is a part of megacompile, which must run as it is",
    told: Callable[[Any], None] | None = None,
) -> Callable[..., Any]:
    """A function that Dynamo leaves as it is, with all that it calls, where it captures a caller.

    Args:
        function: whose call breaks the graph.
        reason: what Dynamo says where it must not break one (`fullgraph=True`).
        told: called with the first argument where Dynamo is at work around the call.
    """
    working: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback
    alone = torch.compiler.disable(function, reason=reason)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not callable(working()):
            return function(*args, **kwargs)
        if told is not None:
            told(args[0])
        return alone(*args, **kwargs)

    skip_code(call.__code__)
    functools.update_wrapper(call, function)
    for name, value in vars(alone).items():
        if name.startswith("_torchdynamo_disable"):
            setattr(call, name, value)
    return call


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's step, without the hooks that users registered for all optimizers."""
    step: Any = type(optimizer).step
    inspect.unwrap(step, stop=lambda f: not getattr(f, "hooked", False))(optimizer)


def has_cpp_compiler() -> bool:
    """Can Inductor compile for the CPU here?"""
    try:
        cpp_builder.get_cpp_compiler()
    except Exception:  # it raises errors of several kinds, by how it looked
        return False
    return True


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """On CUDA: a stream of its own for the duration, done at the end. On the CPU: nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)) as _:
        yield
        torch.cuda.current_stream(device).synchronize()


def keep_state_dtypes(ours: Callable[[torch.Tensor], bool]) -> None:
    """Let `Optimizer.load_state_dict` keep the dtype of states of the parameters that are `ours`.

    It casts them to the parameter's: float32 moments of a bfloat16 parameter would lose bits.
    """
    _STATES_KEPT.append(ours)
    if len(_STATES_KEPT) > 1:
        return
    stock = torch.optim.Optimizer._process_value_according_to_param_policy

    def policy(param: Any, value: Any, param_id: Any, param_groups: Any, key: Any = None) -> Any:
        if key != "step" and any(mine(param) for mine in _STATES_KEPT):
            return value.to(device=param.device)
        return stock(param, value, param_id, param_groups, key)

    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(policy)  # type: ignore[method-assign]


_STATES_KEPT: list[Callable[[torch.Tensor], bool]] = []


def put_first(handle: Any) -> None:
    """Let a hook run before those that are registered in the same place."""
    hooks = handle.hooks_dict_ref()
    assert hooks is not None, "the hooks of an object that is gone"
    hooks.move_to_end(handle.id, last=False)


def put_last(handle: Any) -> None:
    """Let a hook run behind those that are registered in the same place."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None and handle.id in hooks:
        hooks.move_to_end(handle.id)


def compiled_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Callable[..., Any]:
    """`torch.compile(function)` for arguments like these, of any size, as a plain function.

    It runs Dynamo's code for them without Dynamo's look at the arguments: there is no guard, and
    nothing that `torch.compiler.reset()` could take away.
    """
    compiled = torch.compile(function, dynamic=True, fullgraph=True, options=options)
    compiled(*args, **kwargs)
    frame: Any = torch._C._dynamo.eval_frame
    code = frame._debug_get_cache_entry_list(function.__code__)[0].code  # the last one that ran
    made = types.FunctionType(
        code,
        dict(function.__globals__),  # what Dynamo has put there stays
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
