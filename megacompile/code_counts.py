"""Counts the code compiled in this process, the code taken from caches, and the time it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CodeCounts:
    """Counts of one kind of code: graphs, or kernels."""

    found: int = 0  # in caches, those of another process that compiled them meanwhile included
    beside: int = 0  # of these: compiled meanwhile by processes next to this one, for this one
    made: int = 0  # compiled in this process
    time_s: float = 0.0  # that this process took to find and to compile them

    def add(self, *, found: int, made: int, time_s: float, beside: int = 0) -> None:
        """Some more."""
        self.found += found
        self.made += made
        self.beside += min(beside, found)
        self.time_s += time_s

    @property
    def is_none(self) -> bool:
        """True if no code of this kind was needed."""
        return not self.found and not self.made


UPDATES = CodeCounts()  # of this process: optimizers' updates on the host, in C++
KERNELS = CodeCounts()  # of this process: our own kernels in Triton, most of them updates
