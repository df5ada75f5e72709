"""The inputs of a captured graph: calls with equal keys may share a program.

Dynamo captures another graph where a parameter was frozen or unfrozen since.

Building the keys of hundreds of inputs takes milliseconds of Python, and in training only the batch
differs. So a call is first compared with the last call (`LastCall`): parameters by identity, other
tensors by torch's guards, in C.

Dynamo captures a graph with symbols once a size or a number has changed (`SymbolicInputs`). A
program for such a graph serves every call of its *kind* (dtypes, devices, requires_grad,
parameters) whose sizes its code is valid for. Memory is planned for the largest call so far, with
sizes rounded up; a larger call is planned again, with the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from operator import call, is_, itemgetter, ne
from typing import Any
from weakref import ref

import sympy
import torch

from megacompile import compat, packed
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import (
    Ambient,
    ConstantInput,
    GraphInput,
    PackedInput,
    ParamInput,
    constant_key,
)
from megacompile.ir.tensors import Number, SymbolicSizes, TensorMeta, Values, is_size, kind_of
from megacompile.runtime.model.program import Program
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.params.shared_memory import memory_of

Place = Callable[[StreamedParameter], tuple[Bucket, int]]  # a parameter's bucket and index
_NUMBERS = (int, float, bool)


def key_of(place: Place, arg: Any, any_size: bool = False) -> Hashable:
    """The key of an input: calls whose inputs have equal keys may share a program. With `any_size`,
    its sizes are symbols; a parameter is bound to its place in either case."""
    if isinstance(arg, StreamedParameter):
        bucket, index = place(arg)
        return (bucket.key, index)
    if _is_packed(arg):
        wrapping, parts = packed.taken_apart(arg)
        return (wrapping, *(key_of(place, part) for part in parts))
    if isinstance(arg, torch.Tensor):
        return (type(arg), arg.layout, kind_of(arg) if any_size else TensorMeta.of(arg))
    if isinstance(arg, (int, float)):
        return constant_key(arg)
    return (type(arg), arg)


def input_of(place: Place, arg: Any) -> GraphInput:
    """The description of an input that a program is built for. Raises UnsupportedGraphError if
    schedules do not support it."""
    if isinstance(arg, StreamedParameter):
        return ParamInput(*place(arg), arg.requires_grad)
    if _is_packed(arg):
        wrapping, parts = packed.taken_apart(arg)
        made: Any = [input_of(place, part) for part in parts]
        return PackedInput(wrapping, tuple(made))
    if type(arg) in compat.PLAIN_TENSORS:
        if arg.layout is not torch.strided:
            raise UnsupportedGraphError(f"an input has layout {arg.layout}")
        return TensorMeta.of(arg)
    if isinstance(arg, (int, float, bool)):
        return ConstantInput(arg)
    raise UnsupportedGraphError(f"an input is a {type(arg).__name__}")


def taken_apart(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with packed parameters replaced by their leaves."""
    parts = [packed.taken_apart(arg)[1] if _is_packed(arg) else [arg] for arg in args]
    return tuple(part for each in parts for part in each)


def fetched(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace views of parameters that eager code made by device tensors; keep anything else."""
    return tuple(
        arg.clone() if isinstance(arg, StreamedParameter) and arg.is_view else arg for arg in args
    )


def _is_packed(arg: Any) -> bool:
    """True if an argument stands in for a packed parameter: a wrapper over proxies."""
    if not packed.is_wrapper(arg):
        return False
    return all(isinstance(part, StreamedParameter) for part in packed.taken_apart(arg)[1])


# classes of inputs that are neither such a view nor packed
PLAIN = frozenset((StreamedParameter, torch.Tensor, torch.nn.Parameter, int, float, bool))


class LastCall:
    """One call: its program, and the properties another call must share to reuse it. Keeps no
    tensor alive. Of its inputs, the program changes those at `changed` in place."""

    def __init__(
        self, program: Program, ambient: Ambient, args: Sequence[Any], changed: frozenset[int]
    ) -> None:
        proxies = [k for k, arg in enumerate(args) if isinstance(arg, StreamedParameter)]
        tensors = [k for k, arg in enumerate(args) if type(arg) in compat.PLAIN_TENSORS]
        numbers = [k for k, arg in enumerate(args) if type(arg) in _NUMBERS]
        self.program = program
        self._all_changed = changed
        self._ambient = ambient
        self._count = len(args)
        self._proxies_of, self._tensors_of = _taker(proxies), _taker(tensors)
        self._numbers_of = _taker(numbers)
        self._proxies = [ref(proxy) for proxy in self._proxies_of(args)]
        self._numbers = list(map(constant_key, self._numbers_of(args)))
        found = self._tensors_of(args)
        self._alike = compat.tensor_guards(found)
        self._at = list(map(torch.Tensor.data_ptr, found))
        self._changed = [k in changed for k in tensors]
        # the memory that the program changes: no other input may overlap it
        self._spans = list(map(memory_of, compress(found, self._changed)))
        self.is_usable = len(proxies) + len(tensors) + len(numbers) == len(args) and not any(
            t.requires_grad or compat.is_of_transform(t) for t in found
        )

    def is_like(self, ambient: Ambient, args: Sequence[Any], changed: frozenset[int]) -> bool:
        """True if a call with these inputs has the same program."""
        if len(args) != self._count or ambient != self._ambient or changed != self._all_changed:
            return False
        proxies = self._proxies_of(args)
        if not all(map(is_, proxies, map(call, self._proxies))):
            return False
        if list(map(constant_key, self._numbers_of(args))) != self._numbers:
            return False
        tensors = self._tensors_of(args)
        if not self._alike(tensors):
            return False
        if not self._spans:
            return True
        # inputs changed in place must not have moved, and no moved input overlap their memory
        moved = map(ne, map(torch.Tensor.data_ptr, tensors), self._at)
        for tensor, is_changed in compress(zip(tensors, self._changed, strict=True), moved):
            start, stop = memory_of(tensor)
            if is_changed or any(start < end and begin < stop for begin, end in self._spans):
                return False
        return True


def _taker(positions: Sequence[int]) -> Any:
    """A function that returns the items of a tuple at these positions, as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))


PROGRAMS_AT_ONCE = 16  # per kind; the oldest are dropped
STEPS = 2  # planned sizes between two powers of two


class SymbolicInputs:
    """Dynamo's description of a captured graph's inputs, at least one of which is a number. Without
    `floats`, each value of a float is a separate kind of call."""

    def __init__(self, described: Sequence[compat.DescribedInput], *, floats: bool) -> None:
        self.described = described
        self.in_tensors = [k for k, item in enumerate(described) if item.in_tensor]
        self.numbers, self._sized = list[int](), list[int]()
        for k, item in enumerate(described):
            if item.number is not None and (floats or not item.in_tensor):
                self.numbers.append(k)
            if any(isinstance(n, sympy.Basic) for n in (*item.shape, *item.stride)):
                self._sized.append(k)
        sizes = tuple((described[k].shape, described[k].stride) for k in self._sized)
        symbols = [described[k].number for k in self.numbers]
        self._sizes: Callable[..., Any] = compat.as_function(sizes, symbols)

    def plain(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs of a call, with numbers in tensors converted to numbers."""
        given = list(args)
        for k in self.in_tensors:
            if isinstance(given[k], torch.Tensor):
                given[k] = given[k].item()
        return tuple(given)

    def values(self, args: Sequence[Any]) -> list[int | float]:
        """The symbols' values in a call."""
        return [args[k] for k in self.numbers]

    def fits(self, args: Sequence[Any], values: Sequence[int | float]) -> bool:
        """True if the tensors' sizes match Dynamo's description."""
        return all(
            args[k].shape == shape and args[k].stride() == stride
            for k, (shape, stride) in zip(self._sized, self._sizes(*values), strict=True)
        )

    def kind(
        self, key: Callable[[Any, bool], Hashable], args: Sequence[Any]
    ) -> tuple[Hashable, ...]:
        """The key shared by calls that may share programs; `key` returns that of an input, with any
        sizes if its argument is True."""
        return tuple(
            (type(arg),) if k in self.numbers else key(arg, k in self._sized)
            for k, arg in enumerate(args)
        )

    def inputs(
        self, plain: Callable[[Any], GraphInput], args: Sequence[Any]
    ) -> tuple[GraphInput, ...]:
        """The inputs with symbols, with a call's values as hints."""
        found: list[GraphInput] = []
        for k, (item, arg) in enumerate(zip(self.described, args, strict=True)):
            if k in self.numbers:
                found.append(Number(item.number, arg))
                continue
            made = plain(arg)
            if k in self._sized and isinstance(made, TensorMeta):
                made = replace(made, symbolic=SymbolicSizes(item.shape, item.stride))
            found.append(made)
        return tuple(found)


def symbolic_inputs(described: Sequence[compat.DescribedInput]) -> tuple[SymbolicInputs, ...]:
    """The ways to trace a graph: with every number as a symbol, or with only sizes and ints."""
    every, ints = (SymbolicInputs(described, floats=floats) for floats in (True, False))
    return (every, ints) if every.in_tensors and ints.numbers else (every,)


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
    rounded = exact.copy()
    for symbol in filter(is_size, exact):  # up to one of `STEPS` sizes between two powers of two
        size = int(exact[symbol])
        step = max(1, (1 << (size.bit_length() - 1)) // STEPS)
        rounded[symbol] = -(-size // step) * step
    ways = [rounded] if rounded != exact and program.holds(list(rounded.values())) else []
    for way in (*ways, exact):
        yield program.anew(program.plans.compiler.resized(program.stages, way))


def _planned(program: Program) -> Values:
    symbols = program.stages.symbols
    assert symbols is not None
    return symbols.planned
