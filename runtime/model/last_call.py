"""The inputs of a captured graph's last call, to find out quickly that a call is like it.

Keys of hundreds of inputs take milliseconds of Python, and in training they are equal from step to
step: only the batch is another one. So parameters are compared by what they are, other tensors by
torch's own guards, in C.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any
from weakref import ref

import torch

from megacompile import compat
from megacompile.ir.capture import Ambient
from megacompile.ir.keys import constant_key
from megacompile.runtime.model.program import Program
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.params.shared_memory import memory_of

_NUMBERS = (int, float, bool)


class LastCall:
    """One call: its program, and what another call must be like to get the same. It keeps no tensor
    alive.

    Args:
        args: its inputs: proxies, plain tensors that require no grad, and numbers.
        changed: the positions of those that the program changes in place.
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
        # the memory that the program changes: nobody else may have a part of it
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
        """True if what is changed in place lies where it lay, and what is elsewhere now does not
        meet it."""
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
    """Takes the items at these positions: a tuple of them."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: tuple(items[k] for k in positions)
