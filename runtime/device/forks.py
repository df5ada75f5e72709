"""Callbacks around a `fork` of this process (data loaders fork).

A child has no other threads, and locks held by them stay locked forever. So before a fork, work in
flight is finished and megacompile's threads are idle; the child gets new threads, new locks and
private copies of shared memory. Only processes with a model register callbacks.

The order matters: work in flight is awaited while the threads still accept jobs.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

# A thread-safe weak set.
# A `WeakSet` cannot be iterated while another thread adds to it: "Set changed size during
# iteration". Models and buffers are created in several threads.

T = TypeVar("T")


class Live(Generic[T]):
    """A weak set of objects, compared by identity; thread-safe."""

    def __init__(self) -> None:
        self._of: dict[int, weakref.ref[T]] = {}  # by id

    def add(self, one: T) -> None:
        """Add an object."""
        of, key = self._of, id(one)

        def gone(reference: weakref.ref[T]) -> None:
            if of.get(key) is reference:
                of.pop(key, None)

        of[key] = weakref.ref(one, gone)

    def discard(self, one: T) -> None:
        """Remove an object, if present."""
        self._of.pop(id(one), None)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, one: object) -> bool:
        return id(one) in self._of

    def __iter__(self) -> Iterator[T]:
        """The live objects, in order of insertion."""
        references = list(self._of.values())
        return iter([one for reference in references if (one := reference()) is not None])


class Forks(Protocol):
    """An object with fork callbacks; each returns quickly and never raises."""

    def before_fork(self) -> None:
        """Called before a fork, in the forking thread."""

    def after_fork(self, *, in_child: bool) -> None:
        """Called after a fork, once in the parent and once in the child."""


def tell(who: Forks, *, last: bool = False) -> None:
    """Register `who`, by weak reference; `last`: called after the others before a fork."""
    _register()
    _LIVE[last].add(who)


def _before() -> None:
    for group in _LIVE:
        for each in group:
            each.before_fork()


def _after(in_child: bool) -> None:
    for group in reversed(_LIVE):
        for each in group:
            each.after_fork(in_child=in_child)


_LIVE: tuple[Live[Forks], Live[Forks]] = (Live(), Live())


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(
            before=_before,
            after_in_parent=functools.partial(_after, False),
            after_in_child=functools.partial(_after, True),
        )
