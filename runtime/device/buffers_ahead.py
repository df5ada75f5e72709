"""Host buffers that are made in the background, before anybody asks for them.

Pages of a gigabyte take 0.1 s, to page-lock them 0.2 s: of 40 GiB of gradients and states 9 s of a
first step of 65 s, which other parts of that step can hide. A caller that makes a buffer takes one
of its size that is ready, or waits for it where it is being made. What is not there yet he makes
himself.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

from megacompile.runtime.device.background import Background, fulfil, is_over
from megacompile.runtime.device.buffers import HostBuffer


class Wanted(NamedTuple):
    """A buffer that will be asked for."""

    size_bytes: int
    pin: bool  # how it will be asked for
    lock: bool = False  # it will be page-locked after that


class BuffersAhead:
    """Makes buffers, one after the other.

    Args:
        make: makes one; what it raises is not told, because it is raised once more where a caller
            asks for the buffer.
    """

    def __init__(self, make: Callable[[Wanted], HostBuffer]) -> None:
        self._make = make
        self._made: dict[tuple[int, bool], deque[Future[HostBuffer]]] = {}
        self._thread = Background("megacompile-host-memory")

    def begin(self, wanted: Iterable[Wanted]) -> None:
        """Make these, in this order, after those that are not made yet."""
        for each in wanted:
            future: Future[HostBuffer] = Future()
            self._made.setdefault((each.size_bytes, each.pin), deque()).append(future)
            self._thread.submit(functools.partial(_fulfil, future, self._make, each))

    def take(self, size_bytes: int, *, pin: bool) -> HostBuffer | None:
        """One that is made, or being made; None: there is none, and one less is made."""
        try:
            future = self._made[size_bytes, pin].popleft()
        except (KeyError, IndexError):
            return None
        if future.cancel() or future.exception() is not None:
            return None
        return future.result()

    def forget(self) -> None:
        """The others will not be asked for."""
        while self._made:
            _, futures = self._made.popitem()
            while futures:
                futures.popleft().cancel()

    def await_idle(self) -> None:
        """Wait until nothing is being made. What was not asked for has no memory then."""
        self._thread.call(lambda: None)


def _fulfil(
    future: Future[HostBuffer], make: Callable[[Wanted], HostBuffer], wanted: Wanted
) -> None:
    if is_over():
        future.cancel()
    fulfil(future, functools.partial(make, wanted))
