"""Pieces of memory lent to one user after another, so that each is allocated once."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A piece of memory."""

    @property
    def size_bytes(self) -> int: ...


M = TypeVar("M", bound=Sized)

_SLACK = 2  # a piece may be this many times larger than what it is lent to


class Reused(Generic[M]):
    """Pieces of memory; all in all no more than was ever in use at once."""

    def __init__(self) -> None:
        self._lent_bytes = 0
        self.peak_bytes = 0  # that were lent at once
        self._free: list[M] = []  # the longest unused first
        self._returned: deque[M] = deque()  # filled wherever a user dies

    def _make(self, size_bytes: int) -> M:
        """A new piece of at least so many bytes."""
        raise NotImplementedError

    def _drop(self, piece: M) -> None:
        """One is not needed any more."""

    @property
    def lent_bytes(self) -> int:
        """Bytes in use."""
        self._collect()
        return self._lent_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all pieces, lent or not."""
        return self.lent_bytes + sum(piece.size_bytes for piece in self._free)

    def lend(self, size_bytes: int) -> M:
        """One that is free, of about that size, or a new one."""
        self._collect()
        fitting = [p for p in self._free if size_bytes <= p.size_bytes <= _SLACK * size_bytes]
        if fitting:
            piece = min(fitting, key=lambda p: p.size_bytes)
            self._free.remove(piece)
        else:
            limit = max(self.peak_bytes, self._lent_bytes + size_bytes)
            while self._free and self.held_bytes + size_bytes > limit:
                self._drop(self._free.pop(0))
            piece = self._make(size_bytes)
        self._lent_bytes += piece.size_bytes
        self.peak_bytes = max(self.peak_bytes, self._lent_bytes)
        return piece

    def give_back(self, piece: M) -> None:
        """It is not used any more; from any thread, and from a finalizer."""
        self._returned.append(piece)

    def forget(self) -> None:
        """Drop what is not lent."""
        self._collect()
        while self._free:
            self._drop(self._free.pop(0))

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._lent_bytes -= piece.size_bytes
            self._free.append(piece)
