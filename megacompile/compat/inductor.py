"""AOTAutograd's partitioner, Inductor, and its caches: their folders, keys and counts of hits."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import async_compile, codecache, compile_fx, cpp_builder, cpu_vec_isa
from torch._inductor import config as inductor_config
from torch._inductor import ir as inductor_ir
from torch._inductor import lowering as inductor_lowering
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.sizevars import SizeVarAllocator
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Mod
from torch.utils.checkpoint import CheckpointPolicy

from megacompile.compat import operators
from megacompile.compat.graphs import copy_graph
from megacompile.compat.patches import replace
from megacompile.compat.tensors import without_autocast

Tensors = Sequence[torch.Tensor]

_AOT: Any = getattr(compile_fx, "dynamo_common", compile_fx)  # where it looks up `aot_autograd`
_DRAW = operators.define_operator(
    "bernoulli(Tensor like, float p) -> Tensor",
    torch.bernoulli,
    lambda like, p: like.new_empty(like.shape),
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.needs_exact_strides),
)
_BIASED_BACKWARDS = (
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default,
)
_BERNOULLI = torch.ops.aten.bernoulli.p
_ALL_SIZES: ContextVar[bool] = ContextVar("all_sizes", default=False)
_HANDED_ON: ContextVar[list[fx.GraphModule] | None] = ContextVar("handed_on", default=None)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor expects."""
    table = dict(select_decomp_table())
    clamp = table[torch.ops.aten.clamp.default]

    def clamped(x: torch.Tensor, *bounds: Any, **named: Any) -> Any:
        """Inductor's returns ints for ints, even with a symbolic float bound."""
        symbolic = any(isinstance(n, torch.SymFloat) for n in (*bounds, *named.values()))
        exact = x.is_floating_point() or not symbolic
        return clamp(x, *bounds, **named) if exact else NotImplemented

    return {**table, torch.ops.aten.clamp.default: clamped}


def split_joint(
    joint: fx.GraphModule,
    *,
    outputs: int,
    static_primals: Sequence[int],
    memory_budget: float = 1.0,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's min-cut partitioner: (forward returning outputs and saved, backward). The
    graphs generate their Python code on the first call; most are never called."""
    budget = functorch_config.patch(activation_memory_budget=memory_budget)
    with budget, _use_lazy_graph_module(True):
        return min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=outputs, static_lifetime_input_indices=list(static_primals)
        )


# Image pooling, and the operators that Inductor decomposes it into.
POOLS = (
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool2d_with_indices_backward.default,
    torch.ops.aten.avg_pool2d.default,
    torch.ops.aten.avg_pool2d_backward.default,
    torch.ops.aten._adaptive_avg_pool2d.default,
    torch.ops.aten._adaptive_avg_pool2d_backward.default,
    torch.ops.prims._low_memory_max_pool_with_offsets.default,
    torch.ops.prims._low_memory_max_pool_offsets_to_indices.default,
)


def prefers_channels_last(module: fx.GraphModule) -> bool:
    """True if Inductor would use channels-last layout for a graph's convolutions in training."""
    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def mark_recompute(node: fx.Node, *, must: bool) -> None:
    """Make the partitioner recompute a node's value in the backward, or save it."""
    policy = CheckpointPolicy
    node.meta["recompute"] = policy.MUST_RECOMPUTE if must else policy.MUST_SAVE
    node.meta["ac_graph_id"] = 0


def compile_inductor(module: fx.GraphModule, inputs: Tensors) -> Callable[..., Any]:
    """Compile an ATen graph with Inductor; `inputs` are fake tensors and symbols. AOTAutograd does
    not trace a functional graph again, which would take a sixth of the time."""
    _keep_strides_of_biases()
    module = _with_draws_apart(module, inputs)
    mode = _mode_of(inputs)
    context = TracingContext(mode) if mode else None
    # the graph contains its casts
    with tracing(context), without_autocast(), _for_all_sizes(inputs):
        if not _needs_no_tracing(module):
            compiled: Callable[..., Any] = torch._inductor.compile(module, list(inputs))
            return compiled
        handed_on: list[fx.GraphModule] = []
        _hand_graphs_on()
        token = _HANDED_ON.set(handed_on)
        try:
            copy = fx.GraphModule(module, copy_graph(module.graph))
            boxed: Any = torch._inductor.compile(copy, list(inputs))
        finally:
            _HANDED_ON.reset(token)
    return (lambda *given: boxed(list(given))) if handed_on else boxed


def _mode_of(inputs: Sequence[Any]) -> FakeTensorMode | None:
    """The fake mode of a graph's inputs, or a new one if only numbers are symbolic. Inductor's
    caches need its ShapeEnv even without symbols."""
    for mode in (value.fake_mode for value in inputs if isinstance(value, FakeTensor)):
        mode.shape_env = mode.shape_env or ShapeEnv()
        return mode
    numbers = (value for value in inputs if isinstance(value, torch.SymInt))
    return next((FakeTensorMode(shape_env=n.node.shape_env) for n in numbers), None)


@functools.cache
def _keep_strides_of_biases() -> None:
    """Makes Inductor keep the traced strides of the bias of attention's backward. Kernels need rows
    aligned to 4 elements; with symbolic sizes, Inductor copies a padded bias to an unpadded one."""
    for operator in _BIASED_BACKWARDS:
        position = [argument.name for argument in operator._schema.arguments].index("attn_bias")
        stock = inductor_lowering.maybe_layout_constraints(operator)
        assert stock is not None, operator
        inductor_lowering.add_layout_constraint(
            operator, functools.partial(_with_bias_as_traced, stock, position)
        )


def _with_bias_as_traced(
    stock: Callable[..., Any], position: int, node: fx.Node, *args: Any, **kwargs: Any
) -> Any:
    bias, traced = args[position], node.args[position]
    if not (isinstance(bias, inductor_ir.IRNode) and isinstance(traced, fx.Node)):
        return stock(node, *args, **kwargs)
    bias = inductor_ir.ExternKernel.require_exact_strides(bias, traced.meta["val"].stride())
    others, named = stock(node, *args[:position], None, *args[position + 1 :], **kwargs)
    return (*others[:position], bias, *others[position + 1 :]), named


@contextmanager
def _for_all_sizes(inputs: Sequence[Any]) -> Iterator[None]:
    """A context in which code compiled with symbols is right for all sizes: Inductor assumes no
    multiples of 8 (an attention mask), and no sizes above which fused kernels are faster."""
    sizes = [n for x in inputs for n in (x.shape if isinstance(x, torch.Tensor) else (x,))]
    if not any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in sizes):
        yield
        return

    def guard_or_false(stock: Any, self: SizeVarAllocator, relation: Any) -> bool:
        atoms: Callable[[type], Any] = getattr(relation, "atoms", lambda kind: ())
        if _ALL_SIZES.get() and atoms(Mod):
            return bool(self.statically_known_true(relation))
        return bool(stock(self, relation))

    replace(SizeVarAllocator, "guard_or_false", guard_or_false)
    token = _ALL_SIZES.set(True)
    try:
        with inductor_config.patch({"triton.mix_order_reduction_non_strict_mode": True}):
            yield
    finally:
        _ALL_SIZES.reset(token)


def _with_draws_apart(module: fx.GraphModule, inputs: Tensors) -> fx.GraphModule:
    """A copy whose draws are operators that Inductor calls without lowering them, where it would
    lower a `bernoulli` to one that writes into a buffer, not on CUDA: in torch 2.11, readers of
    that buffer can be fused with code before the write."""
    decomposed = any(x.is_cuda for x in inputs if isinstance(x, torch.Tensor))
    draws = module.graph.find_nodes(op="call_function", target=_BERNOULLI)
    if not draws or (decomposed and not inductor_config.fallback_random):
        return module
    graph = copy_graph(module.graph)
    for node in graph.find_nodes(op="call_function", target=_BERNOULLI):
        if not node.kwargs:  # no generator
            node.target = _DRAW
    return fx.GraphModule(module, graph)


def _needs_no_tracing(module: fx.GraphModule) -> bool:
    """True if AOTAutograd would leave a graph unchanged: ATen operators without mutation."""
    if inductor_config.freezing or inductor_config.triton.cudagraphs:
        return False
    values = (node for node in module.graph.nodes if node.op == "call_function")
    return all(node.op != "call_module" for node in module.graph.nodes) and all(
        _is_functional(node.target) and "unbacked_bindings" not in node.meta for node in values
    )


def _is_functional(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable
    return not isinstance(target, torch._ops.HigherOrderOperator)  # else arithmetic on numbers


def _hand_graphs_on() -> None:
    """Makes `aot_autograd` pass the graphs of `compile_inductor` on, in its thread only, with fake
    values in the inputs' mode."""

    def aot_autograd(stock: Any, **named: Any) -> Any:
        handed_on = _HANDED_ON.get()
        if handed_on is None:  # also other backends' calls
            return stock(**named)

        def compile_it(module: fx.GraphModule, inputs: Tensors) -> Any:
            handed_on.append(module)
            module.graph.eliminate_dead_code()
            with torch.no_grad():
                compile_fx.fake_tensor_prop(module, inputs, force_allow_non_fake_inputs=True)
                return named["inference_compiler"](module, inputs)

        return compile_it

    replace(_AOT, "aot_autograd", aot_autograd)


def packed_graph(module: fx.GraphModule) -> bytes:
    """Serialise a graph of `compile_inductor`, without its nodes' metadata, for another process.
    Raises exceptions of any kind: a graph may contain objects that cannot be pickled."""
    if any("unbacked_bindings" in node.meta for node in module.graph.nodes):
        raise ValueError("a size in the graph depends on data")
    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: False)
    graph = GraphPickler.dumps(fx.GraphModule(module, copy_graph(module.graph)), options)
    return pickle.dumps((operators.taken_tensors(module.graph), graph))


def unpacked_graph(given: bytes) -> fx.GraphModule:
    """The graph of `packed_graph`, without its nodes' values."""
    taken, graph = pickle.loads(given)
    for name, names in taken:
        operators.define_taking(name, names)
    module = GraphPickler.loads(graph, FakeTensorMode(shape_env=ShapeEnv()))
    assert isinstance(module, fx.GraphModule)
    return module


def use_compile_threads(count: int) -> None:
    """Set the number of processes that compile kernels for this one."""
    inductor_config.compile_threads = count


def compile_threads() -> int:
    """Number of processes that compile kernels; 1 if this process compiles them itself."""
    return int(inductor_config.compile_threads or 1)


def compiles_in_processes() -> bool:
    """True if other processes, which load no kernels, may compile for this one: with caches, and
    without autotuning."""
    tunes = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    return code_cache() is not None and inductor_config.compile_threads != 1 and not tunes


def start_compile_workers() -> None:
    """Start the processes in which Inductor compiles kernels, unless the user disabled them."""
    async_compile.maybe_warm_pool()


@contextmanager
def without_device_memory() -> Iterator[None]:
    """A context that compiles for a GPU without a CUDA context: kernels are not loaded, and fake
    tensors do not initialize the device."""

    with (
        mock.patch.object(fake_tensor, "init_gpu_context", lambda _: None),
        mock.patch.object(CachingAutotuner, "_make_launchers", lambda _: None),
        mock.patch.object(CachingAutotuner, "_dynamic_scale_rblock", lambda _: None),
    ):
        yield


def has_cpp_compiler() -> bool:
    """True if Inductor can compile for the CPU here."""
    try:
        cpp_builder.get_cpp_compiler()
    except Exception:  # its type depends on how torch searched
        return False
    return True


def vector_isas() -> list[str]:
    """The vector instruction sets that Inductor's CPU code may use here. The first call tests each,
    in a process that imports torch."""
    return [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()]


def use_vector_isas(names: Sequence[str]) -> None:
    """Apply the `vector_isas` of another process: only sets not in `names` are tested. Inductor
    still drops sets that this CPU does not report."""
    tried = cpu_vec_isa.VecISA.check_build

    def is_usable(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        return str(isa) in names or tried(isa, code)

    with mock.patch.object(cpu_vec_isa.VecISA, "check_build", is_usable):
        cpu_vec_isa.valid_vec_isa_list()


# Environment variables with the caches' folders.
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def code_cache() -> Path | None:
    """The folder of compiled code on disk; None if caches are off."""
    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        return None
    return Path(cache_dir())


def settle_cache_keys() -> None:
    """Makes the keys of Inductor's caches, hashes of pickles, independent of the order of imports:
    a `torch.memory_format` pickles as a name in the first module that has an attribute `torch`.
    Settings that choose kernels become part of the keys: without cuDNN, code for the strides of
    cuDNN's results fails."""

    def init(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.dispatch_table[torch.memory_format] = lambda value: (str, (str(value),))

    def describe(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.kernel_switches = operators.kernel_switches()

    replace(codecache.FxGraphCachePickler, "__init__", init)
    replace(codecache.FxGraphHashDetails, "__init__", describe)


def cache_counts() -> tuple[int, int]:
    """Graphs that Inductor found in its caches so far, and those that it compiled in this process;
    it counts none if its caches are off."""
    of = counters["inductor"]
    return of["fxgraph_cache_hit"], of["fxgraph_cache_miss"] + of["fxgraph_cache_bypass"]


_REDUCED = tuple(f"allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16"))
_MATMUL = ("fp32_precision", *_REDUCED)


def compile_settings() -> bytes:
    """Settings of this process that are part of cache keys, for a process that finds or fills the
    caches. Includes the system: a process that sees no GPU would have other keys."""
    settle_cache_keys()
    matmul = torch.backends.cuda.matmul
    return pickle.dumps(
        {
            "inductor": inductor_config.save_config_portable(ignore_private_configs=False),
            "functorch": functorch_config.save_config_portable(ignore_private_configs=False),
            "system": codecache.CacheBase.get_system(),
            "matmul": {name: getattr(matmul, name) for name in _MATMUL},
            "kernels": operators.kernel_switches(),
            "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            "dtype": torch.get_default_dtype(),
        }
    )


def use_compile_settings(given: bytes) -> None:
    """Apply another process's settings to this process."""
    settle_cache_keys()
    settings = pickle.loads(given)
    _use(settings)
    base: Any = codecache.CacheBase
    base.get_system = staticmethod(lambda: settings["system"])


@contextmanager
def compile_settings_in_use(given: bytes) -> Iterator[None]:
    """A context with this process's settings as recorded in `given`."""
    before = pickle.loads(compile_settings())
    _use(pickle.loads(given))
    try:
        yield
    finally:
        _use(before)


def _use(settings: dict[str, Any]) -> None:
    for config, name in ((inductor_config, "inductor"), (functorch_config, "functorch")):
        for key, value in settings[name].items():
            if functools.reduce(getattr, key.split("."), config) != value:
                setattr(config, key, value)
    for name, value in settings["matmul"].items():
        if getattr(torch.backends.cuda.matmul, name) != value:
            setattr(torch.backends.cuda.matmul, name, value)
    operators.set_kernel_switches(settings["kernels"])
    torch.utils.deterministic.fill_uninitialized_memory = settings["fill"]  # type: ignore[attr-defined]
    torch.set_default_dtype(settings["dtype"])
