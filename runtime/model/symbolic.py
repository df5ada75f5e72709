"""Selects the program of a captured graph whose sizes are symbols.

Dynamo captures a graph with symbols once a size or a number has changed. A program for such a graph
serves every call of its *kind* (dtypes, devices, requires_grad, parameters) whose sizes its code is
valid for. If code specialized on a size, other sizes get another program.

Memory is planned for the largest call so far. A larger call is planned again, with the same code.
Sizes are rounded up, so that lengths that grow by one do not each need a plan.
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

PROGRAMS_AT_ONCE = 16  # per kind; the oldest are dropped
STEPS = 2  # planned sizes between two powers of two


class SymbolicInputs:
    """Dynamo's description of a captured graph's inputs.

    Args:
        described: a description of each input; at least one is a number.
        floats: a float may be a symbol; otherwise each of its values is a separate kind of call.
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
        """The inputs of a call, with numbers in tensors converted to numbers."""
        if not self._in_tensors:
            return tuple(args)
        given = list(args)
        for k in self._in_tensors:
            if isinstance(given[k], torch.Tensor):
                given[k] = given[k].item()
        return tuple(given)

    @property
    def has_floats(self) -> bool:
        """True if a tensor holds a number."""
        return bool(self._in_tensors)

    @property
    def any(self) -> bool:
        """True if any input has a symbol."""
        return bool(self._numbers)

    def values(self, args: Sequence[Any]) -> list[int | float]:
        """The symbols' values in a call."""
        return [args[k] for k in self._numbers]

    def fits(self, args: Sequence[Any], values: Sequence[int | float]) -> bool:
        """True if the tensors' sizes match Dynamo's description."""
        return all(
            args[k].shape == shape and args[k].stride() == stride
            for k, (shape, stride) in zip(self._sized, self._sizes(*values), strict=True)
        )

    def kind(
        self, key: Callable[[Any, bool], Hashable], args: Sequence[Any]
    ) -> tuple[Hashable, ...]:
        """The key shared by calls that may share programs.

        Args:
            key: returns an input's key; True: its sizes are symbols.
        """
        return tuple(
            (type(arg),) if k in self._numbers else key(arg, k in self._sized)
            for k, arg in enumerate(args)
        )

    def inputs(
        self, plain: Callable[[Any], GraphInput], args: Sequence[Any]
    ) -> tuple[GraphInput, ...]:
        """The inputs with symbols, with a call's values as hints."""
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
    """The ways to trace a graph: with every number as a symbol, or with only sizes and ints."""
    found = SymbolicInputs(described), SymbolicInputs(described, floats=False)
    return found if found[0].has_floats and found[1].any else found[:1]


def _has_symbols(item: compat.DescribedInput) -> bool:
    return any(isinstance(n, sympy.Basic) for n in (*item.shape, *item.stride))


def covers(program: Program, values: Sequence[int | float]) -> bool:
    """True if the planned memory is enough for a call with these values."""
    planned = list(_planned(program).values())
    if all(value <= most for value, most in zip(values, planned, strict=True)):
        return True
    return program.size_bytes(*values) <= program.size_bytes(*planned)


def with_room(program: Program, values: Sequence[int | float]) -> Iterator[Program]:
    """The program for calls with these values, without schedules: first planned for slightly larger
    sizes, if its code is valid for them; then for these alone."""
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
    """The size, rounded up to one of `STEPS` sizes between two powers of two."""
    step = max(1, (1 << (size.bit_length() - 1)) // STEPS)
    return -(-size // step) * step
