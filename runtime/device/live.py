"""A thread-safe weak set.

A `WeakSet` cannot be walked through while another thread adds to it: "Set changed size during
iteration". Models and buffers are made in several threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

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
