"""A captured graph, its inputs, and the global state at capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Bucket, Param
from megacompile.ir.keys import constant_key
from megacompile.ir.symbols import Number, planned_of
from megacompile.ir.tensors import TensorMeta


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
class TensorInput:
    """A captured graph's input that is a tensor: data, an activation, a buffer, a constant."""

    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Rebuilds a wrapper subclass tensor from its component tensors.

    It is called with the components, and appears in graphs as the function.
    """

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
        return compat.unflatten_wrapper(self.cls, parts, self.context, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class PackedInput:
    """A captured graph's input that is a wrapper subclass; the `unpack` pass replaces it by its
    components."""

    wrapping: Wrapping
    parts: tuple[ParamInput, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ConstantInput:
    """A captured graph's input that is a Python number: a dynamic size, a flag."""

    value: int | float | bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConstantInput) and constant_key(self.value) == constant_key(
            other.value
        )

    def __hash__(self) -> int:
        return hash(constant_key(self.value))


@dataclass(frozen=True, slots=True)
class NumberInput:
    """A captured graph's input that is a number and changes between calls."""

    number: Number  # a symbol


GraphInput = ParamInput | PackedInput | TensorInput | ConstantInput | NumberInput


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
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        )
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
class Overlap:
    """Inputs of a captured graph that share memory, as views of one base of `numel` elements."""

    members: tuple[tuple[int, int], ...]  # (position among the inputs, offset in the base)
    numel: int
    hindrance: str = ""  # the reason why they cannot be views of one base, or ""


@dataclass(frozen=True, slots=True)
class InputView:
    """An output of a captured graph that is a view of an input."""

    shape: tuple[int | Number, ...]
    stride: tuple[int | Number, ...]
    offset: int | Number  # offset from the input's first element, in elements
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured torch-level graph with one kind of input bound to each placeholder."""

    name: str
    module: fx.GraphModule = field(repr=False)
    inputs: tuple[GraphInput, ...]
    device: torch.device
    ambient: Ambient
    overlaps: tuple[Overlap, ...] = ()  # between inputs, one of which the graph changes in place
    conditions: tuple[Any, ...] = ()  # relations between symbols that the passes rely on

    @property
    def bound(self) -> dict[fx.Node, GraphInput]:
        """The input of each placeholder of the graph, in order."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        return dict(zip(placeholders, self.inputs, strict=True))

    @property
    def symbols(self) -> dict[sympy.Symbol, fx.Node]:
        """The placeholders of changing numbers, by symbol."""
        each = self.bound.items()
        return {i.number.expression: node for node, i in each if isinstance(i, NumberInput)}

    def fresh(self) -> Capture:
        """The same capture with a copy of the graph for a pass to change."""
        graph = compat.copy_graph(self.module.graph)
        return replace(self, module=compat.graph_module(self.module, graph))

    def under(self, conditions: Sequence[Any]) -> Capture:
        """The capture with additional relations of its symbols."""
        if not conditions:
            return self
        return replace(self, conditions=(*self.conditions, *conditions))

    @property
    def planned(self) -> dict[sympy.Symbol, int | float]:
        """The planned values, by symbol, in the order of the inputs."""
        return planned_of([item.number for item in self.inputs if isinstance(item, NumberInput)])


@dataclass(frozen=True, slots=True)
class Variant:
    """The properties that one schedule of a captured graph is built for."""

    tangents: tuple[int, ...]  # the outputs that get a gradient
    keep_last: bool  # False: saved tensors are recomputed
    accumulate: bool = False  # accumulate into gradients on the host
    reuse: bool = False  # the backward, or a forward without one, reuses the slots of a forward
    update: bool = False  # optimizer update in the backward
    defers: bool = False  # gradients are not summed over replicas yet: another backward follows
