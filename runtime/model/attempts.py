"""Decides which calls are captured, and which graphs scheduled.

Where that failed for the calls before, few try: what fails takes as long as what does not, and most
often the next one fails too. Calls in `megacompile.eager(model)`, and those without gradients that
keep making schedules, such as a loop that samples with a growing cache, run as plain code.
Parameters are copied to the device for each use, as in any code that is not captured.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megacompile import compat, notices

_FIRST = 3  # calls in a row that are all tried
_MOST = 256  # calls between two tries


class Attempts:
    """The attempts of one captured function or graph: all calls at first, then every second,
    fourth, ... one."""

    def __init__(self) -> None:
        self.why_not = ""  # the last call that was tried failed
        self._failed = 0  # in a row
        self._wait = 0  # calls until the next try

    def is_due(self) -> bool:
        """True if the call that begins is one to try."""
        if self._wait:
            self._wait -= 1
            return False
        return True

    def traced(self) -> None:
        """The call needed no attempt, or it succeeded."""
        self._failed = self._wait = 0

    def failed(self, why: str) -> None:
        """It failed, and without it the call succeeded."""
        self.why_not = why
        self._failed += 1
        if self._failed >= _FIRST:
            self._wait = min(_MOST, 2 ** (self._failed - _FIRST + 1)) - 1


# A model that is another case in each call: it is captured, or its code made, at every step.
#
# It is one to Dynamo, which gives up only after hundreds of captures (`compat.CALL_OPTIONS`), or
# what was captured needs other code for each set of sizes. Each takes seconds.

_CALLS = 16  # the newest ones
_CAPTURED = 8  # so many of them: it is said


class CapturedAgain:
    """Says once of a model that many of its calls capture it again, and why.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.said = False
        self._took_s: deque[float] = deque(maxlen=_CALLS)  # of each call: 0 if it captured nothing

    def note(self, compiled: Callable[..., Any], took_s: float, for_sizes: str = "") -> None:
        """After a call that was not the first one.

        Args:
            compiled: what was called: a function that `torch.compile` gave.
            took_s: what the call took in seconds, if it captured or made code; otherwise 0.
            for_sizes: why it made code for other sizes of what was captured before, if it did.
        """
        if self.said:
            return
        self._took_s.append(took_s)
        anew = [took_s for took_s in self._took_s if took_s]
        if len(anew) < _CAPTURED:
            return
        self.said = True
        if for_sizes:
            why, fix = for_sizes, "pad to a few sizes"
        else:
            failed = compat.why_captured_again(compiled) or "TORCH_LOGS=recompiles says what"
            why = f"what they were captured for did not hold ({failed})"
            fix = "let fewer things change from call to call, or make them arguments, or tensors"
        notices.warn(
            f"megacompile: {self.name} was captured anew in {len(anew)} of its last "
            f"{len(self._took_s)} calls, which took {sum(anew):.1f} s (slower, same numbers; said "
            f"once): {why}; {fix}"
        )


# Calls that run as plain code.

_NEW_CALLS = 4  # in a row, which all made programs
_NEW_PROGRAMS = 24  # that these made: a program costs about a tenth of a second, and a capture more


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
            many = self.calls >= _NEW_CALLS and self.programs >= _NEW_PROGRAMS
            self._between = min(_MOST, max(2 * self._between, many))
        else:
            self.calls = self.programs = 0
            self._between //= 2
        self.wait = self._between
