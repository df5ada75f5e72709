"""Autograd's graph and engine; torch.optim and torch.amp's GradScaler."""

from __future__ import annotations

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import _pytree

from megacompile.compat.distributed import is_sharded
from megacompile.compat.patches import replace

_C: Any = torch._C  # its stubs leave these out


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """A context that disables the user's saved-tensor hooks (checkpoint, save_on_cpu)."""
    autograd: Any = torch._C._autograd  # the stubs assume that the stack is never empty
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, without its search of all arguments for `torch.func` wrappers."""
    left = torch._C._are_functorch_transforms_active()
    for arg in args:
        if type(arg) is torch.Tensor:
            left = left or torch._C._functorch.is_functorch_wrapped_tensor(arg)
    if left:
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


# Inside a backward: true if it was called with `retain_graph=True`.
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph


def accumulator_of(param: torch.Tensor) -> Node:
    """The AccumulateGrad node of a leaf. It lives only while it is referenced."""
    if not is_sharded(param):
        node: Node = torch.autograd.graph._get_grad_fn_or_grad_acc(param)
        return node
    with torch.enable_grad():  # torch's way creates a view, which fails for 0 rows
        alias: Any = torch.ops.aten.alias(param).grad_fn
    accumulator: Node = alias.next_functions[0][0]
    return accumulator


def hooks_of(node: Node) -> tuple[dict[int, Any], dict[int, Any]]:
    """The Python pre- and post-hooks of a node; the dicts are live. Excludes C++ hooks (those of
    DistributedDataParallel)."""
    hooks = []
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(lambda *gradients: None)
        hooks.append(handle.hooks_dict_ref())
        handle.remove()
    return hooks[0], hooks[1]


def accumulates_into(nodes: Iterable[Node]) -> bool | None:
    """Inside a backward: true if it will run all of these AccumulateGrad nodes; None if
    `autograd.grad()` was called for the parameter of one."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # it raises for a leaf requested by autograd.grad()
        return None


@dataclass(eq=False, slots=True)
class BackwardCall:
    """One call of `backward()` or `autograd.grad()`, while it runs."""

    roots: tuple[Any, ...]  # tensors, or gradient edges
    users: Any = None  # facts cached by users


def note_backward_calls(
    leaf_of: Callable[[Any], Any], as_asked: Callable[[Any, torch.Tensor], torch.Tensor]
) -> None:
    """Records every call of a backward from now on, for `backward_calls`. `leaf_of` maps a tensor
    in `inputs=` to the one whose gradient autograd computes; `as_asked` maps (tensor in `inputs=`,
    that gradient) to the gradient to return."""

    def run(stock: Any, t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = tuple(args[3:4] and args[3])  # torch passes them by position
        leaves = tuple(map(leaf_of, inputs))
        if not all(map(operator.is_, leaves, inputs)):
            args = (*args[:3], leaves, *args[4:])
        call = BackwardCall(tuple(t_outputs))
        _BACKWARD_CALLS.append(call)
        try:
            found = stock(t_outputs, *args, **kwargs)
            if not found:  # of `backward()`
                return found
            return tuple(
                gradient if gradient is None or leaf is given else as_asked(given, gradient)
                for gradient, leaf, given in zip(found, leaves, inputs, strict=True)
            )
        finally:
            _BACKWARD_CALLS.remove(call)
            call.roots = ()  # remaining references to the call hold no graph
            call.users = None

    modules: Any = torch.autograd.graph, torch.autograd
    replace(modules[0], "_engine_run_backward", run)
    modules[1]._engine_run_backward = modules[0]._engine_run_backward


def backward_calls() -> tuple[BackwardCall, ...]:
    """The running calls in all threads. Autograd's own threads have no link to theirs."""
    return tuple(_BACKWARD_CALLS)


_BACKWARD_CALLS: list[BackwardCall] = []


# The class of AccumulateGrad nodes.
ACCUMULATOR: Any = getattr(torch._C._functions, "AccumulateGrad")  # noqa: B009

# The class of the nodes of a `torch.autograd.Function`.
node_class: Callable[[Any], Any] = operator.attrgetter("_backward_cls")


def run_soon(node: Node) -> None:
    """Make autograd run a node as early as possible, like AccumulateGrad nodes."""
    node._set_sequence_nr(2**63 - 1)  # type: ignore[attr-defined]


def in_compiled_autograd() -> bool:
    """Inside a backward: true if compiled autograd runs it."""
    return bool(torch._dynamo.compiled_autograd.in_compiled_autograd_region)


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Inside a backward: call `callback` in the thread of `backward()`, just before it returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# A number that is equal within one call of `backward()`; -1 outside of one.
backward_id: Callable[[], int] = _C._current_graph_task_id


def move_hook(handle: Any, *, last: bool) -> None:
    """Move a hook before or after the other hooks in the same dict, if both still exist."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None and handle.id in hooks:
        hooks.move_to_end(handle.id, last=last)


def notice_scaled_losses() -> None:
    """Records every loss that a GradScaler scales from now on, for `loss_is_scaled`."""

    def note(gradient: torch.Tensor) -> None:
        _SCALED[:] = [backward_id()]

    def scale(stock: Any, self: Any, outputs: Any) -> Any:
        scaled = stock(self, outputs)
        for value in _pytree.tree_leaves(scaled) if self.is_enabled() else ():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(note)
        return scaled

    replace(torch.amp.GradScaler, "scale", scale)


def loss_is_scaled() -> bool:
    """Inside a backward: true if it came through a loss that a GradScaler scaled."""
    return backward_id() in _SCALED


_SCALED: list[int] = []  # the last such backward


def wait_for_scales() -> None:
    """Makes every GradScaler wait for the copies that gradients on the host need: of its scale,
    and of its flag for infinite ones. Torch starts them and reads on: a flag that is copied late
    hides the infinite gradients that were found, and the step that should be skipped is made."""

    def get(stock: Any, self: Any, device: torch.device) -> torch.Tensor:
        copies: dict[torch.device, torch.Tensor] = self._per_device_tensors
        if device.type == "cpu" and device not in copies:
            copies[device] = self.master.to(device, copy=True)
        value: torch.Tensor = stock(self, device)
        return value

    replace(torch.amp.grad_scaler._MultiDeviceReplicator, "get", get)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer's step, without the hooks that users registered for all optimizers."""
    step: Any = type(optimizer).step
    inspect.unwrap(step, stop=lambda f: not getattr(f, "hooked", False))(optimizer)


def takes_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if hooks can be registered on an optimizer: `Optimizer.__init__` has run. Many wrappers
    (timm's Lookahead) do not call it, and make plain dicts, which no handle can refer to."""
    hooks = "step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre"
    own = vars(optimizer)
    return all(isinstance(own.get(f"_optimizer_{name}_hooks"), OrderedDict) for name in hooks)


def keep_state_dtypes(ours: Callable[[torch.Tensor], bool]) -> None:
    """Makes `Optimizer.load_state_dict` keep the dtypes of states, for parameters that are `ours`:
    torch casts float32 moments of a bfloat16 parameter."""
    _STATES_KEPT.append(ours)

    def policy(stock: Any, param: Any, value: Any, of: Any, groups: Any, key: Any = None) -> Any:
        if key != "step" and any(mine(param) for mine in _STATES_KEPT):
            return value.to(device=param.device)
        return stock(param, value, of, groups, key)

    replace(torch.optim.Optimizer, "_process_value_according_to_param_policy", policy)


_STATES_KEPT: list[Callable[[torch.Tensor], bool]] = []
