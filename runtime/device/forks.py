"""Calls around a `fork` of this process, for those who asked: data loaders fork.

Threads do not exist in a child, and locks that another thread held there stay locked for ever. So
before a fork what is in flight comes to its end and threads of ours come to rest; the child gets
new threads, locks and, where the parent shares it, memory of its own. Only a process in which a
model lives asks for it.

The order matters: what is in flight is waited for while the threads still take work.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

# A thread-safe weak set.
#
# A `WeakSet` cannot be walked through while another thread adds to it: "Set changed size during
# iteration". Models and buffers are made in several threads.

T = TypeVar("T")


class Live(Generic[T]):
    """Objects, each itself and not what equals it, for as long as they live; in any thread."""

    def __init__(self) -> None:
        self._of: dict[int, weakref.ref[T]] = {}  # by their ids

    def add(self, one: T) -> None:
        """Know of one."""
        of, key = self._of, id(one)

        def gone(reference: weakref.ref[T]) -> None:
            if of.get(key) is reference:
                of.pop(key, None)

        of[key] = weakref.ref(one, gone)

    def discard(self, one: T) -> None:
        """Forget one, if it is known."""
        self._of.pop(id(one), None)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, one: object) -> bool:
        return id(one) in self._of

    def __iter__(self) -> Iterator[T]:
        """Those that live now, in the order in which they came."""
        found = [reference() for reference in list(self._of.values())]
        return iter([one for one in found if one is not None])


class Forks(Protocol):
    """An object that is told of forks; each of these returns soon, and raises nothing."""

    def before_fork(self) -> None:
        """The process is about to fork, in the thread that calls this."""

    def after_fork(self, *, in_child: bool) -> None:
        """It has: called once in the parent and once in the child."""


def tell(who: Forks, *, last: bool = False) -> None:
    """Tell `who`, as long as it lives; `last`: it comes after the others before a fork."""
    _register()
    _LIVE[last].add(who)


def _before() -> None:
    for some in _LIVE:
        for each in some:
            each.before_fork()


def _after(in_child: bool) -> None:
    for some in reversed(_LIVE):
        for each in some:
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
