"""Keys of a captured graph's inputs: calls with equal keys may share a program.

Building the keys of hundreds of inputs takes milliseconds of Python, and in training they are equal
from step to step: only the batch differs. So a call is first compared with the last call
(`LastCall`): parameters by identity, other tensors by torch's guards, in C.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Hashable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import ref

import torch

from megacompile import compat, packed
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import (
    Ambient,
    ConstantInput,
    GraphInput,
    PackedInput,
    ParamInput,
    TensorInput,
)
from megacompile.ir.keys import constant_key
from megacompile.ir.tensors import TensorMeta, kind_of
from megacompile.runtime.model.program import Program
from megacompile.runtime.model.start import Place
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.params.shared_memory import memory_of

_NUMBERS = (int, float, bool)


def key_of(place: Place, arg: Any, any_size: bool = False) -> Hashable:
    """The key of an input: calls whose inputs have equal keys may share a program.

    Args:
        place: returns the bucket of a parameter, and its index there.
        arg: an input of the captured graph.
        any_size: the input's sizes are symbols. A parameter is bound to its place in either case.
    """
    if isinstance(arg, StreamedParameter):
        bucket, index = place(arg)
        return (bucket.key, index, arg.param is not None and arg.param.requires_grad)
    if _is_packed(arg):
        wrapping, parts = packed.taken_apart(arg)
        return (wrapping, *(key_of(place, part) for part in parts))
    if isinstance(arg, torch.Tensor):
        return (type(arg), arg.layout, kind_of(arg) if any_size else TensorMeta.of(arg))
    if isinstance(arg, (int, float)):
        return constant_key(arg)
    return (type(arg), arg)


def input_of(place: Place, arg: Any) -> GraphInput:
    """The description of an input that a program is built for.

    Raises:
        UnsupportedGraphError: schedules do not support this input.
    """

    def of_param(proxy: torch.Tensor) -> ParamInput:
        assert isinstance(proxy, StreamedParameter)
        return ParamInput(*place(proxy), proxy.requires_grad)

    if isinstance(arg, StreamedParameter):
        return of_param(arg)
    if _is_packed(arg):
        wrapping, parts = packed.taken_apart(arg)
        return PackedInput(wrapping, tuple(map(of_param, parts)))
    if type(arg) in compat.PLAIN_TENSORS:
        if arg.layout is not torch.strided:
            raise UnsupportedGraphError(f"an input has layout {arg.layout}")
        return TensorInput(TensorMeta.of(arg))
    if isinstance(arg, (int, float, bool)):
        return ConstantInput(arg)
    raise UnsupportedGraphError(f"an input is a {type(arg).__name__}")


def taken_apart(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with packed parameters replaced by their leaves."""
    if _PLAIN.issuperset(map(type, args)):
        return args
    parts = [packed.taken_apart(arg)[1] if _is_packed(arg) else [arg] for arg in args]
    return tuple(part for each in parts for part in each)


def fetched(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace views of parameters that eager code made by device tensors; keep anything else."""
    views = [isinstance(arg, StreamedParameter) and arg.is_view for arg in args]
    if True not in views:
        return args
    return tuple(arg.clone() if view else arg for arg, view in zip(args, views, strict=True))


def _is_packed(arg: Any) -> bool:
    """True if an argument stands in for a packed parameter: a wrapper over proxies."""
    if not packed.is_wrapper(arg):
        return False
    return all(isinstance(part, StreamedParameter) for part in packed.taken_apart(arg)[1])


_PLAIN = frozenset((StreamedParameter, torch.Tensor, torch.nn.Parameter, int, float, bool))


class LastCall:
    """One call: its program, and the properties another call must share to reuse it. Keeps no
    tensor alive.

    Args:
        args: its inputs: proxies, plain tensors that require no grad, and numbers.
        changed: the positions of the inputs that the program changes in place.
    """

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
        self._trained = list(map(_TRAINED, self._proxies_of(args)))
        self._numbers = list(map(constant_key, self._numbers_of(args)))
        found = self._tensors_of(args)
        self._alike = compat.tensor_guards(found)
        self._at = list(map(torch.Tensor.data_ptr, found))
        # the memory that the program changes: no other input may overlap it
        self._changed = [k in changed for k in tensors]
        each = zip(found, self._changed, strict=True)
        self._spans = sorted(memory_of(tensor) for tensor, is_changed in each if is_changed)
        self.is_usable = len(proxies) + len(tensors) + len(numbers) == len(args) and not any(
            t.requires_grad or compat.is_of_transform(t) for t in found
        )

    def is_like(self, ambient: Ambient, args: Sequence[Any], changed: frozenset[int]) -> bool:
        """True if a call with these inputs has the same program."""
        if len(args) != self._count or ambient != self._ambient or changed != self._all_changed:
            return False
        proxies = self._proxies_of(args)
        if not all(map(is_, proxies, [proxy() for proxy in self._proxies])):
            return False
        if list(map(_TRAINED, proxies)) != self._trained:
            return False
        if list(map(constant_key, self._numbers_of(args))) != self._numbers:
            return False
        tensors = self._tensors_of(args)
        return self._alike(tensors) and self._is_apart(tensors)

    def _is_apart(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if inputs changed in place have the same addresses, and no moved input overlaps
        them."""
        if not self._spans:
            return True
        at = list(map(torch.Tensor.data_ptr, tensors))
        if at == self._at:
            return True
        moved = [k for k, (now, then) in enumerate(zip(at, self._at, strict=True)) if now != then]
        return not any(self._changed[k] or self._meets(tensors[k]) for k in moved)

    def _meets(self, tensor: torch.Tensor) -> bool:
        start, stop = memory_of(tensor)
        k = bisect(self._spans, (start, stop))
        before = k > 0 and self._spans[k - 1][1] > start
        return before or (k < len(self._spans) and self._spans[k][0] < stop)


_TRAINED = attrgetter("param.requires_grad")


def _taker(positions: Sequence[int]) -> Any:
    """A function that returns the items of a tuple at these positions, as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    first = positions[0] if positions else 0
    return itemgetter(slice(first, first + len(positions)))
