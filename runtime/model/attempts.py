"""Decides if a call is traced, or its graph scheduled, where that failed for the calls before.

What fails takes as long as what does not, and most often the next one fails too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
