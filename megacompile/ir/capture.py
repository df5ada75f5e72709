"""A captured graph, its inputs, and the global state at capture.

Keys are equal for equivalent constants, functions and graphs. Compared by identity, no two layers
would be equal: each may have its own configuration object, or a function that Dynamo generated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Bucket, Param
from megacompile.ir.tensors import Number, TensorMeta, planned_of

PLAIN = frozenset(
    map(type, (0, 0.0, False, 0j, "", None, ..., torch.int8, torch.strided, torch.device("cpu")))
) | {torch.memory_format}


def key_of(value: Any, other: Callable[[Any], Hashable]) -> Hashable:
    """A key for a value: a constant (a plain value or an enum member) or a container of values
    (which may be a slice or a frozen dataclass). `other` returns the keys of all other objects."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # -0.0 differs from 0.0, and nan equals itself
    if kind in PLAIN or isinstance(value, enum.Enum):
        return kind, value
    if isinstance(value, dict):
        return kind, tuple((name, key_of(part, other)) for name, part in value.items())
    parts: Iterable[Any]
    if isinstance(value, (tuple, list)):
        parts = value
    elif kind is slice:
        parts = (value.start, value.stop, value.step)
    elif dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        parts = (getattr(value, field.name) for field in dataclasses.fields(kind))
    else:
        return other(value)
    return kind, tuple(key_of(part, other) for part in parts)


def constant_key(value: Any) -> Hashable:
    """A key for constants, and for immutable containers of them. Raises TypeError for anything
    else."""

    def other(value: Any) -> Hashable:
        raise TypeError(f"{type(value).__name__} is not a constant")

    hash(value)  # raises TypeError for a mutable container
    return key_of(value, other)


def function_key(function: Any) -> Hashable:
    """A key for live functions with the same code and the same closure; other objects are compared
    by identity."""
    if type(function) is not types.FunctionType or not function.__closure__:
        return function  # type: ignore[no-any-return]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    try:
        inside = [cell.cell_contents for cell in function.__closure__]
    except ValueError:  # a cell is empty
        return function
    around = (function.__globals__, *defaults, *inside)
    return function.__code__, tuple(map(id, around))


def graph_key(module: fx.GraphModule) -> Hashable:
    """A key for graph modules that compute the same function of their inputs. Sharing by shape
    alone is a trap: layers of equal shape may differ in an attribute (a sliding window, a scale).
    The key is therefore the graph itself, with names replaced by positions."""
    position: dict[fx.Node, int] = {}
    rows: list[Hashable] = []

    def other(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return "node", position[value]
        by_value = isinstance(value, Hashable) and not isinstance(value, torch.Tensor)
        return (type(value), value) if by_value else ("object", id(value))

    for i, node in enumerate(module.graph.nodes):
        position[node] = i
        target = None if node.op in ("placeholder", "output") else function_key(node.target)
        if node.op in ("get_attr", "call_module"):
            value = operator.attrgetter(str(node.target))(module)  # kept alive by the graph
            is_graph = isinstance(value, fx.GraphModule)
            target = ("graph", graph_key(value)) if is_graph else ("object", id(value))
        rows.append((node.op, target, key_of((node.args, node.kwargs), other)))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class ParamInput:
    """A captured graph's input that is a streamed parameter."""

    bucket: Bucket
    param: int  # index into bucket.params
    requires_grad: bool

    @property
    def info(self) -> Param:
        """The parameter."""
        return self.bucket.params[self.param]


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Rebuilds a wrapper subclass tensor from its component tensors. In a graph it is the function
    of a call that takes the components."""

    cls: type[torch.Tensor]
    names: tuple[str, ...]  # the attribute names of the components
    inner: tuple[Wrapping | None, ...]  # for components that are wrappers themselves
    context: Any = field(hash=False)  # other arguments of the class
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def __name__(self) -> str:
        return f"as_{self.cls.__name__}"

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The wrapper over `tensors`; nested wrappers are given by their components."""
        return self._wrapped(iter(tensors))

    def _wrapped(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        parts = {
            name: next(tensors) if nested is None else nested._wrapped(tensors)
            for name, nested in zip(self.names, self.inner, strict=True)
        }
        unflatten: Any = self.cls.__tensor_unflatten__  # type: ignore[attr-defined]
        return unflatten(parts, self.context, torch.Size(self.shape), self.stride)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PackedInput:
    """A captured graph's input that is a wrapper subclass; the `unpack` pass replaces it by its
    components."""

    wrapping: Wrapping
    parts: tuple[ParamInput, ...]


@dataclass(frozen=True, slots=True)
class ConstantInput:
    """A captured graph's input that is a Python number: a dynamic size, a flag."""

    value: int | float | bool = field(compare=False)
    key: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", constant_key(self.value))


# A meta describes a tensor (data, an activation, a buffer, a constant), or a number that changes
# between calls: a symbol.
GraphInput = ParamInput | PackedInput | ConstantInput | TensorMeta | Number


@dataclass(frozen=True, slots=True)
class Ambient:
    """The state in which a graph was captured and must be traced: thread-local state, and
    process-wide settings that choose kernels (`sdpa_kernel`, `cudnn.enabled`)."""

    grad_enabled: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]  # (device type, enabled, dtype)
    default_dtype: torch.dtype
    kernels: tuple[Any, ...]  # see `compat.kernel_switches`

    @staticmethod
    def current(device: torch.device) -> Ambient:
        """The current state, as relevant for work on `device`."""
        kinds = sorted({"cpu", device.type})
        enabled = map(torch.is_autocast_enabled, kinds)
        autocast = tuple(zip(kinds, enabled, map(torch.get_autocast_dtype, kinds), strict=True))
        kernels = compat.kernel_switches()
        return Ambient(torch.is_grad_enabled(), autocast, torch.get_default_dtype(), kernels)

    @contextlib.contextmanager
    def apply(self, *, autocast: bool = True) -> Iterator[None]:
        """Set this thread to that state (with `autocast=False`: autocast off)."""
        with contextlib.ExitStack() as stack:
            stack.callback(compat.set_kernel_switches, compat.kernel_switches())
            compat.set_kernel_switches(self.kernels)
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for kind, enabled, dtype in self.autocast:
                on = enabled and autocast
                stack.enter_context(
                    torch.autocast(kind, dtype if on else None, enabled=on, cache_enabled=False)
                )
            yield


@dataclass(frozen=True, slots=True)
class InputView:
    """An output of a captured graph that is a view of an input."""

    shape: tuple[int | Number, ...]
    stride: tuple[int | Number, ...]
    offset: int | Number  # offset from the input's first element, in elements
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One entry of the history of a captured graph and then of its schedule."""

    name: str
    before: str  # the schedule's actions, one graph per line; for a captured graph, its calls
    after: str
    time_s: float
    nodes: int  # in all graphs, after the pass


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured torch-level graph with one kind of input bound to each placeholder."""

    name: str
    module: fx.GraphModule = field(repr=False)
    inputs: tuple[GraphInput, ...]
    device: torch.device
    ambient: Ambient
    history: tuple[PassRecord, ...] = field(default=(), compare=False, repr=False)

    @property
    def bound(self) -> dict[fx.Node, GraphInput]:
        """The input of each placeholder of the graph, in order."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return dict(zip(placeholders, self.inputs, strict=True))

    @property
    def symbols(self) -> dict[sympy.Symbol, fx.Node]:
        """The placeholders of changing numbers, by symbol."""
        return {i.expression: node for node, i in self.bound.items() if isinstance(i, Number)}

    def fresh(self) -> Capture:
        """The same capture with a copy of the graph for a pass to change."""
        graph = compat.copy_graph(self.module.graph)
        return replace(self, module=compat.graph_module(self.module, graph))

    @property
    def planned(self) -> dict[sympy.Symbol, int | float]:
        """The planned values, by symbol, in the order of the inputs."""
        return planned_of(self.inputs)


@dataclass(frozen=True, slots=True)
class Variant:
    """The properties that one schedule of a captured graph is built for."""

    tangents: tuple[int, ...]  # the outputs that get a gradient
    keep_last: bool  # False: saved tensors are recomputed
    accumulate: bool = False  # accumulate into gradients on the host
    reuse: bool = False  # the backward, or a forward without one, reuses the slots of a forward
    update: bool = False  # optimizer update in the backward
    defers: bool = False  # gradients are not summed over replicas yet: another backward follows
