"""Descriptions of tensors and of numbers, without data.

Numbers that change from call to call are sizes and Python number inputs of a graph. Plans, costs
and views use planned values. Traced code is valid for all values that satisfy the traced graphs'
conditions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import sympy
import torch

from megacompile import compat

Values = Mapping[sympy.Symbol, int | float]


@dataclass(frozen=True, slots=True)
class SymbolicSizes:
    """A tensor's shape and strides, as expressions of symbols and as ints."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Number:
    """A number as an expression of symbols, with its planned value. As a stage input it has the
    tensor-meta attributes that passes read."""

    expression: Any
    planned: int | float
    requires_grad: ClassVar[bool] = False
    shape: ClassVar[tuple[int, ...]] = ()
    size_bytes: ClassVar[int] = 0
    device: ClassVar[torch.device] = torch.device("cpu")

    def __repr__(self) -> str:
        return repr(self.planned)  # in the Python of a schedule

    def zeros(self) -> Any:
        """The number: symbolic while tensors are symbolic, otherwise its planned value."""
        fakes = compat.symbols_now()
        return self.planned if fakes is None else fakes.number(self.expression)

    def at(self, values: Values) -> Number:
        """The number with another planned value."""
        return replace(self, planned=compat.evaluated(self.expression, values))


@dataclass(frozen=True, slots=True)
class Symbols:
    """The symbols of a captured graph, with the planned values."""

    planned: Mapping[sympy.Symbol, int | float]
    fakes: compat.SymbolicFakes  # the mode in which its values were found


def symbols_in(value: Any) -> frozenset[sympy.Symbol]:
    """The symbols in a meta, a number, an expression or a tuple of them."""
    if isinstance(value, sympy.Basic):
        return frozenset(value.free_symbols)
    if isinstance(value, Number):
        return symbols_in(value.expression)
    if isinstance(value, SymbolicSizes):
        return symbols_in((*value.shape, *value.stride))
    if isinstance(value, (tuple, list)):
        return frozenset().union(*map(symbols_in, value))
    sizes = getattr(value, "symbolic", None)
    return frozenset() if sizes is None else symbols_in(sizes)


def parts_of(value: Any) -> list[Any]:
    """The values in nested tuples, lists and slices."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in parts_of(item)]
    return [value]


def has_numbers(value: Any) -> bool:
    """True for a `Number` or a container of one."""
    return any(isinstance(part, Number) for part in parts_of(value))


def is_size(symbol: sympy.Symbol) -> bool:
    """True if a symbol is the size of a dimension."""
    return bool(symbol.is_positive)


def planned_of(inputs: Iterable[Any]) -> dict[sympy.Symbol, int | float]:
    """The planned values of the numbers among a graph's inputs, by symbol."""
    return {item.expression: item.planned for item in inputs if isinstance(item, Number)}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The description of a tensor, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool = False
    device: torch.device = torch.device("cpu")
    symbolic: SymbolicSizes | None = None  # shape and stride have the planned values

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMeta:
        """The meta of a dense tensor."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        symbolic = None
        if any(type(n) is not int for n in (*shape, *stride)):
            each = [list(map(compat.expression_of, sizes)) for sizes in (shape, stride)]
            shape, stride = (tuple(n for n, _ in sizes) for sizes in each)
            found = SymbolicSizes(*(tuple(e for _, e in sizes) for sizes in each))
            symbolic = found if symbols_in(found) else None
        needs_grad = tensor.requires_grad and not _cut_off(tensor)
        return TensorMeta(shape, tensor.dtype, stride, needs_grad, tensor.device, symbolic)

    def at(self, values: Values) -> TensorMeta:
        """The meta, planned for other values of its symbols."""
        if self.symbolic is None:
            return self
        shape, stride = (
            tuple(compat.evaluated(n, values) for n in sizes)
            for sizes in (self.symbolic.shape, self.symbolic.stride)
        )
        return replace(self, shape=shape, stride=stride)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Its shape: ints, and expressions of symbols for sizes that change."""
        return self.shape if self.symbolic is None else self.symbolic.shape

    @property
    def overlaps_itself(self) -> bool:
        """True if some of its elements share an address."""
        end = 1  # beyond the reach of the smaller strides
        for stride, n in sorted(zip(self.stride, self.shape, strict=True)):
            if n > 1 and stride < end:
                return True
            end += stride * (n - 1) if n > 1 else 0
        return False

    def contiguous(self) -> TensorMeta:
        """The meta of a contiguous tensor of that shape."""
        symbolic, order = self.symbolic, range(len(self.shape))[::-1]
        if symbolic is not None:
            symbolic = replace(symbolic, stride=compat.dense_strides(symbolic.shape, order))
        return replace(self, stride=compat.dense_strides(self.shape, order), symbolic=symbolic)

    def empty(self) -> torch.Tensor:
        """A new tensor like this (fake under a fake mode, symbolic if the mode has symbols)."""
        shape: Any = self.shape
        stride: Any = self.stride
        fakes = compat.symbols_now()
        if self.symbolic is not None and fakes is not None:
            shape = tuple(map(fakes.number, self.symbolic.shape))
            stride = tuple(map(fakes.number, self.symbolic.stride))
        return torch.empty_strided(
            shape, stride, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad
        )

    def zeros(self) -> torch.Tensor:
        """A new tensor of zeros like this."""
        with torch.no_grad():
            return self.empty().zero_()

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements (not of its storage)."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


def is_dense(meta: TensorMeta, strides: tuple[int, ...]) -> bool:
    """True if no two elements share an address and there are no gaps."""
    expected = 1
    for stride, size in sorted(zip(strides, meta.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def dense(tensor: torch.Tensor, like: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The tensor, or a dense copy of it, with the memory order that strides `like` give a tensor of
    this shape."""
    order = sorted(range(tensor.dim()), key=lambda d: (like[d], shape[d]), reverse=True)
    strides = compat.dense_strides(tensor.shape, reversed(order))
    if tensor.stride() == strides:
        return tensor
    if all(tensor.shape[d] == 1 or tensor.stride(d) == strides[d] for d in order):
        return tensor.as_strided(tensor.shape, strides)  # convolutions read them for size 1 too
    return tensor.permute(order).contiguous().permute([*map(order.index, range(len(order)))])


Meta = TensorMeta | Number  # describes a stage input
M = TypeVar("M", bound=Meta)


def any_size(meta: M) -> M:
    """The meta without planned sizes, where sizes are symbolic."""
    if isinstance(meta, Number):
        return replace(meta, planned=0)
    return meta if meta.symbolic is None else replace(meta, shape=(), stride=())


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, bool]:
    """Dtype, device and requires_grad of a tensor of any size."""
    return tensor.dtype, tensor.device, tensor.requires_grad and not _cut_off(tensor)


def _cut_off(tensor: torch.Tensor) -> bool:
    """True for a view made under `no_grad`: it has `requires_grad`, but no gradient flows."""
    base = compat.base_of(tensor)
    return base is not None and base.requires_grad and tensor.grad_fn is None


def short_dtype(dtype: torch.dtype) -> str:
    """ "bf16" for torch.bfloat16, as FX prints it."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def tensors_bytes(value: Any) -> int:
    """Bytes of a TensorMeta or of a nested tuple of them (None counts nothing)."""
    if isinstance(value, TensorMeta):
        return value.size_bytes
    if isinstance(value, tuple):
        return sum(tensors_bytes(item) for item in value)
    return 0
