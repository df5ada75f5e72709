"""Decides which calls are captured and which graphs are scheduled.

After repeated failures only a few calls try again: a failed attempt takes as long as a successful
one, and the next attempt usually fails too. Two kinds of calls run as plain code: calls in
`megacompile.eager(model)`, and calls without gradients that keep making schedules, such as a
sampling loop with a growing cache. Plain code copies each parameter to the device for each use,
like any uncaptured code.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from megacompile import compat, notices

_MOST = 255  # calls between two tries


class Backoff:
    """Skips calls: none at first, then every second one, three of four, and so on."""

    def __init__(self) -> None:
        self.skipped = 0  # calls between two tries
        self._wait = 0  # calls until the next try

    def is_due(self) -> bool:
        """True if the call that begins should be tried."""
        if self._wait:
            self._wait -= 1
            return False
        return True

    def skip(self, calls: int) -> None:
        """Skip this many calls before the next try, and between later ones."""
        self.skipped = self._wait = min(_MOST, calls)


class Attempts(Backoff):
    """The attempts to capture one function or to schedule one graph; skips calls after three
    consecutive failures."""

    def __init__(self) -> None:
        super().__init__()
        self.why_not = ""  # the last attempt failed
        self._failed = 0  # consecutive failures

    def traced(self) -> None:
        """Record a call that needed no attempt or succeeded."""
        self._failed = 0
        self.skip(0)

    def failed(self, why: str) -> None:
        """Record a failed attempt whose call then succeeded in eager mode."""
        self.why_not = why
        self._failed += 1
        if self._failed >= 3:
            self.skip(2 * self.skipped + 1)


class Inferences(Backoff):
    """The calls of one function without gradients; skips calls after consecutive ones that have
    made many programs, each at least one."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = self._programs = 0  # consecutive calls that made programs; these programs

    def note(self, model: nn.Module, made: int) -> None:
        """Record a captured call and the number of programs that it made; warns once for each
        model."""
        if not made:
            self._calls = self._programs = 0
            self.skip(self.skipped // 2)
            return
        self._calls += 1
        self._programs += made
        # a program costs about 0.1 s, a capture more
        if self.skipped or (self._calls >= 4 and self._programs >= 24):
            self.skip(max(1, 2 * self.skipped))
            notices.warn_once(
                "calls without gradients",
                f"megacompile: {type(model).__name__} made {self._programs} schedules in "
                f"{self._calls} consecutive calls without gradients, because each had new shapes "
                "or numbers. From now on, most such calls run in eager mode and fetch parameters "
                "at each use (slower, same numbers; shown once). Put a loop that samples into "
                "`with megacompile.eager(model):`, or keep shapes constant: a cache of a fixed "
                "size, with the position as a tensor",
                of=model,
            )


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


class CapturedAgain:
    """Warns once if half of a model's last 16 calls captured it again, or compiled code for other
    sizes, which takes seconds each time; Dynamo gives up only after hundreds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._took_s: deque[float] = deque(maxlen=16)  # per call; 0 if it captured nothing

    def note(self, compiled: Callable[..., Any], took_s: float, for_sizes: str = "") -> None:
        """Record a call that was not the first one: its seconds if it captured or compiled
        something, otherwise 0; `for_sizes`: why it compiled code for other sizes of an earlier
        capture, if it did."""
        self._took_s.append(took_s)
        slow_s = [each for each in self._took_s if each]
        if not took_s or len(slow_s) < 8 or not notices.is_new("captured again", self):
            return
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
