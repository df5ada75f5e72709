"""Numbers that change from call to call: sizes, and Python number inputs of a graph.

Plans, costs and views use specific values. Traced code is valid for all values that satisfy the
traced graphs' conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    """A number as an expression of symbols, with its planned value.

    As a stage input it has the tensor-meta attributes that passes read.
    """

    expression: Any
    planned: int | float

    def __repr__(self) -> str:
        return repr(self.planned)  # in the Python of a schedule

    @property
    def requires_grad(self) -> bool:
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def size_bytes(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

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
    fakes: compat.SymbolicFakes  # the inputs that its values were found with

    def condition(self) -> Callable[..., bool]:
        """A function that says if the values found are right for values of the symbols, in their
        order."""
        return self.fakes.holds


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


def has_numbers(value: Any) -> bool:
    """True for a `Number` or a container of one."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, (tuple, list)):
        return any(map(has_numbers, value))
    return isinstance(value, Number)


def is_size(symbol: sympy.Symbol) -> bool:
    """True if a symbol is the size of a dimension."""
    return bool(symbol.is_positive)


def planned_of(numbers: Sequence[Number]) -> dict[sympy.Symbol, int | float]:
    """The planned values of a graph's inputs, by symbol."""
    return {number.expression: number.planned for number in numbers}
