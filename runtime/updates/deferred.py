"""Device memory that copies to the host still read: `defer_free` keeps it, `drain` returns it.

What no forward drains, because there is none, goes when something else is deferred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Deferred:
    """Device memory that a copy to the host may still read."""

    value: Any
    copied: torch.cuda.Event
    owner: torch.cuda.Stream  # whose memory it is in the caching allocator
    forget: Callable[[], None] = lambda: None  # called when it goes


class DeferredFrees:
    """Memory that is kept until copies out of it are done, or are waited for."""

    def __init__(self) -> None:
        self._entries: list[Deferred] = []

    def add(self, entry: Deferred) -> None:
        """Keep it; what is copied by now goes."""
        waiting = [entry]
        for earlier in reversed(self._entries):
            if earlier.copied.query():
                earlier.forget()
            else:
                waiting.insert(0, earlier)
        self._entries = waiting

    def take(self) -> list[Deferred]:
        """All that there is: the caller waits for the copies, and lets it go."""
        taken, self._entries = self._entries, []
        return taken
