"""The programs of a captured graph whose sizes are symbols: which of them a call gets.

Dynamo captures a graph with symbols once a size or a number has changed. A program for such a graph
serves every call of its *kind* (dtypes, devices, what requires grad, which parameters) for whose
sizes its code is right. Where code asked what a size is, other sizes get another program.

Memory is planned for the largest call so far. A call that needs more is planned for again, with the
same code. Sizes are rounded up, so that lengths that grow by one are not planned for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from megacompile import compat
from megacompile.ir.capture import GraphInput, NumberInput, TensorInput
from megacompile.ir.symbols import Number, SymbolicSizes, Values, is_size
from megacompile.runtime.model.program import Program

PROGRAMS_AT_ONCE = 16  # of a kind; those that were built first go
STEPS = 2  # sizes that are planned for, from one power of two to the next


class SymbolicInputs:
    """Dynamo's description of a captured graph's inputs.

    Args:
        described: of each input; at least one is a number.
        floats: may a float be a symbol? Else each of its values is a kind of call.
    """

    def __init__(self, described: Sequence[compat.DescribedInput], *, floats: bool = True) -> None:
        self.described = described
        self._in_tensors = [k for k, item in enumerate(described) if item.in_tensor]
        constant = () if floats else self._in_tensors
        self._numbers = [
            k for k, item in enumerate(described) if item.number is not None and k not in constant
        ]
        self._sized = [k for k, item in enumerate(described) if _has_symbols(item)]
        symbols = [item.number for k, item in enumerate(described) if k in self._numbers]
        sizes = tuple((described[k].shape, described[k].stride) for k in self._sized)
        self._sizes: Callable[..., Any] = compat.as_function(sizes, symbols)

    def plain(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs of a call, with the numbers that come in tensors as numbers."""
        if not self._in_tensors:
            return tuple(args)
        given = list(args)
        for k in self._in_tensors:
            if isinstance(given[k], torch.Tensor):
                given[k] = given[k].item()
        return tuple(given)

    @property
    def has_floats(self) -> bool:
        """True if a number comes in a tensor."""
        return bool(self._in_tensors)

    @property
    def any(self) -> bool:
        """True if there is a symbol."""
        return bool(self._numbers)

    def values(self, args: Sequence[Any]) -> list[int | float]:
        """The symbols' values in a call."""
        return [args[k] for k in self._numbers]

    def fits(self, args: Sequence[Any], values: Sequence[int | float]) -> bool:
        """True if the tensors' sizes are what Dynamo said they are."""
        return all(
            args[k].shape == shape and args[k].stride() == stride
            for k, (shape, stride) in zip(self._sized, self._sizes(*values), strict=True)
        )

    def kind(
        self, key: Callable[[Any, bool], Hashable], args: Sequence[Any]
    ) -> tuple[Hashable, ...]:
        """The key that calls which share programs have in common.

        Args:
            key: what an input is known by; True: its sizes are symbols.
        """
        return tuple(
            (type(arg),) if k in self._numbers else key(arg, k in self._sized)
            for k, arg in enumerate(args)
        )

    def inputs(
        self, plain: Callable[[Any], GraphInput], args: Sequence[Any]
    ) -> tuple[GraphInput, ...]:
        """The inputs with symbols, planned for those of a call."""
        found: list[GraphInput] = []
        for k, (item, arg) in enumerate(zip(self.described, args, strict=True)):
            if item.number is not None and k in self._numbers:
                found.append(NumberInput(Number(item.number, arg)))
                continue
            made = plain(arg)
            if _has_symbols(item) and isinstance(made, TensorInput):
                sizes = SymbolicSizes(item.shape, item.stride)
                made = TensorInput(replace(made.meta, symbolic=sizes))
            found.append(made)
        return tuple(found)


def symbolic_inputs(described: Sequence[compat.DescribedInput]) -> tuple[SymbolicInputs, ...]:
    """The ways tried for a graph: every number a symbol; then sizes and ints alone."""
    found = SymbolicInputs(described), SymbolicInputs(described, floats=False)
    return found if found[0].has_floats and found[1].any else found[:1]


def _has_symbols(item: compat.DescribedInput) -> bool:
    return any(isinstance(n, sympy.Basic) for n in (*item.shape, *item.stride))


def covers(program: Program, values: Sequence[int | float]) -> bool:
    """True if enough memory is planned for a call with these values."""
    planned = list(_planned(program).values())
    if all(value <= most for value, most in zip(values, planned, strict=True)):
        return True
    return program.size_bytes(*values) <= program.size_bytes(*planned)


def with_room(program: Program, values: Sequence[int | float]) -> Iterator[Program]:
    """The program for calls with these values, without schedules: with room for sizes that are a
    little larger, where its code is right for them; then for these alone."""
    exact = dict(zip(_planned(program), values, strict=True))
    rounded = {
        symbol: _rounded(int(value)) if is_size(symbol) else value
        for symbol, value in exact.items()
    }
    if rounded != exact and program.holds(list(rounded.values())):
        yield _resized(program, rounded)
    yield _resized(program, exact)


def _planned(program: Program) -> Values:
    symbols = program.stages.symbols
    assert symbols is not None
    return symbols.planned


def _resized(program: Program, values: Values) -> Program:
    return program.anew(program.plans.compiler.resized(program.stages, values))


def _rounded(size: int) -> int:
    """The size or the next one of `STEPS` from one power of two to the next."""
    step = max(1, (1 << (size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step
