"""Decides which calls are captured and which graphs are scheduled.

After repeated failures only a few calls try again: a failed attempt takes as long as a successful
one, and the next attempt usually fails too. Two kinds of calls run as plain code: calls in
`megacompile.eager(model)`, and calls without gradients that keep making schedules, such as a
sampling loop with a growing cache. Plain code copies each parameter to the device for each use,
like any uncaptured code.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megacompile import compat, notices

_FIRST = 3  # consecutive calls that are all tried
_MOST = 256  # calls between two tries


class Attempts:
    """The attempts to capture one function or to schedule one graph: at every call at first; after
    repeated failures at every second call, every fourth, and so on."""

    def __init__(self) -> None:
        self.why_not = ""  # the last attempt failed
        self._failed = 0  # consecutive failures
        self._wait = 0  # calls until the next attempt

    def is_due(self) -> bool:
        """True if the call that begins should be tried."""
        if self._wait:
            self._wait -= 1
            return False
        return True

    def traced(self) -> None:
        """Record a call that needed no attempt or succeeded."""
        self._failed = self._wait = 0

    def failed(self, why: str) -> None:
        """Record a failed attempt whose call then succeeded in eager mode."""
        self.why_not = why
        self._failed += 1
        if self._failed >= _FIRST:
            self._wait = min(_MOST, 2 ** (self._failed - _FIRST + 1)) - 1


# A model whose calls all differ: every step captures it again or compiles new code for it.
# Either Dynamo recaptures it and gives up only after hundreds of captures (`compat.CALL_OPTIONS`),
# or the captured graph needs new code for each set of sizes. Both take seconds per call.

_CALLS = 16  # the newest calls
_CAPTURED = 8  # a warning after this many of them


class CapturedAgain:
    """Warns once if many calls of a model capture it again, and says why.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.said = False
        self._took_s: deque[float] = deque(maxlen=_CALLS)  # per call; 0 if it captured nothing

    def note(self, compiled: Callable[..., Any], took_s: float, for_sizes: str = "") -> None:
        """Record a call that was not the first one.

        Args:
            compiled: the called function, as `torch.compile` returned it.
            took_s: the call's duration in seconds if it captured or compiled something; otherwise
                0.
            for_sizes: why it compiled code for other sizes of an earlier capture, if it did.
        """
        if self.said:
            return
        self._took_s.append(took_s)
        if not took_s:
            return
        slow_s = [took_s for took_s in self._took_s if took_s]
        if len(slow_s) < _CAPTURED:
            return
        self.said = True
        if for_sizes:
            why, fix = for_sizes, "pad to a few sizes"
        else:
            failed = compat.why_captured_again(compiled) or "TORCH_LOGS=recompiles shows it"
            why = f"a condition of earlier captures did not hold ({failed})"
            fix = (
                "keep it constant from call to call, pass it as an argument or a tensor, or make "
                "such calls in `with megacompile.eager(model):`"
            )
        notices.warn(
            f"megacompile: {self.name} was captured again in {len(slow_s)} of its last "
            f"{len(self._took_s)} calls, which took {sum(slow_s):.1f} s (slower, same numbers; "
            f"shown once): {why}; {fix}"
        )


# Calls that run as plain code.

_NEW_CALLS = 4  # consecutive calls that all made programs
_NEW_PROGRAMS = 24  # programs made by those calls: a program costs about 0.1 s, a capture more


class EagerBlocks(threading.local):
    """The `megacompile.eager` blocks of one model that this thread is in."""

    depth = 0

    @contextmanager
    def block(self) -> Iterator[None]:
        """Disable capture for this thread's calls inside the block."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class CaptureThrottle:
    """Decides which calls without gradients are captured.

    At first, all of them. Once consecutive calls of a function have made many programs, each of
    them at least one, only every second call is captured, then every fourth, and so on. A captured
    call that made no program shortens the interval again.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._said = False
        self._rows = weakref.WeakKeyDictionary[Callable[..., Any], _Row]()

    def is_due(self, compiled: Callable[..., Any]) -> bool:
        """True if the call that begins should be captured.

        Args:
            compiled: the called function, as `torch.compile` returned it.
        """
        row = self._rows.setdefault(compiled, _Row())
        if row.wait:
            row.wait -= 1
            return False
        return True

    def note(self, compiled: Callable[..., Any], made: int) -> None:
        """Record a captured call and the number of programs that it made."""
        row = self._rows[compiled]
        row.note(made)
        if self._said or not row.wait:
            return
        self._said = True
        notices.warn(
            f"megacompile: {self.name} made {row.programs} schedules in {row.calls} consecutive "
            "calls without gradients, because each had new shapes or numbers. From now on, most "
            "such calls run in eager mode and fetch parameters at each use (slower, same numbers; "
            "shown once). Put a loop that samples into `with megacompile.eager(model):`, or keep "
            "shapes constant: a cache of a fixed size, with the position as a tensor"
        )


class _Row:
    """The latest consecutive calls of one function that made programs."""

    def __init__(self) -> None:
        self.calls = self.programs = 0
        self.wait = 0  # calls until the next captured one
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
