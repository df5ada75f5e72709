"""Numbers that change from call to call: sizes, and Python numbers that a graph is given.

What is planned, costed and shown is made for certain values of them. What is traced is right for
all values for which the traced graphs' conditions hold.
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
    """A number as an expression of symbols, and what it is for the values that are planned for.

    Among a stage's inputs it has the attributes of a tensor's meta that passes ask for.
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
        """The number: symbolic while tensors are, else what is planned for."""
        fakes = compat.symbols_now()
        return self.planned if fakes is None else fakes.number(self.expression)

    def at(self, values: Values) -> Number:
        """The number, planned for other values."""
        return replace(self, planned=compat.evaluated(self.expression, values))


@dataclass(frozen=True, slots=True)
class Symbols:
    """The symbols of a captured graph, with the values that are planned for."""

    planned: Mapping[sympy.Symbol, int | float]
    fakes: compat.SymbolicFakes  # that its values were found with

    def condition(self) -> Callable[..., bool]:
        """A function that says if the values found are right for values of the symbols, in their
        order."""
        return self.fakes.holds


def symbols_in(value: Any) -> frozenset[sympy.Symbol]:
    """The symbols that a meta, a number, an expression or a tuple of them is made of."""
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
    """True if it is a `Number`, or holds one."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, (tuple, list)):
        return any(map(has_numbers, value))
    return isinstance(value, Number)


def is_size(symbol: sympy.Symbol) -> bool:
    """True if a symbol is the size of a dimension."""
    return bool(symbol.is_positive)


def planned_of(numbers: Sequence[Number]) -> dict[sympy.Symbol, int | float]:
    """The values that the inputs of a graph are planned for, by symbol."""
    return {number.expression: number.planned for number in numbers}
