"""Calls that run as plain code, without capture: those in `megacompile.eager(model)`, and those
without gradients that keep making schedules, such as a loop that samples with a growing cache.

Parameters are copied to the device for each use, as in any code that is not captured.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megacompile import notices

_CALLS = 4  # in a row, which all made programs
_PROGRAMS = 24  # that these made: a program costs about a tenth of a second, and a capture more
_MOST = 256  # calls between two tries


class EagerBlocks(threading.local):
    """The blocks of `megacompile.eager` that this thread is in, for one model."""

    depth = 0

    @contextmanager
    def block(self) -> Iterator[None]:
        """Calls of this thread are not captured inside."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class EverNew:
    """Says of calls without gradients which are captured.

    All of them at first. Of a function whose calls made programs several times in a row, many
    together, every second one, then every fourth, ... One that made none brings them closer again.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._said = False
        self._rows = weakref.WeakKeyDictionary[Callable[..., Any], _Row]()

    def is_due(self, compiled: Callable[..., Any]) -> bool:
        """True if the call that begins is one to capture.

        Args:
            compiled: what is called: a function that `torch.compile` gave.
        """
        row = self._rows.setdefault(compiled, _Row())
        if row.wait:
            row.wait -= 1
            return False
        return True

    def note(self, compiled: Callable[..., Any], made: int) -> None:
        """After a call that was captured, and made so many programs."""
        row = self._rows[compiled]
        row.note(made)
        if self._said or not row.wait:
            return
        self._said = True
        notices.warn(
            f"megacompile: {self.name} made {row.programs} schedules in {row.calls} calls without "
            "gradients, one after the other: each came with shapes or numbers that no schedule was "
            "there for. Such calls run in eager mode from now on and fetch parameters at each use; "
            "few of them try again (slower, same numbers; said once). Write `with "
            "megacompile.eager(model):` around a loop that samples, or let shapes stay the same, "
            "so that schedules serve again: a cache of a fixed size, the position in it as a tensor"
        )


class _Row:
    """The newest calls of one function, those that made programs one after the other."""

    def __init__(self) -> None:
        self.calls = self.programs = 0
        self.wait = 0  # calls until the next one that is captured
        self._between = 0

    def note(self, made: int) -> None:
        if made:
            self.calls += 1
            self.programs += made
            many = self.calls >= _CALLS and self.programs >= _PROGRAMS
            self._between = min(_MOST, max(2 * self._between, many))
        else:
            self.calls = self.programs = 0
            self._between //= 2
        self.wait = self._between
