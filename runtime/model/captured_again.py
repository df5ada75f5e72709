"""A model that is another case to Dynamo in each call: it is captured and compiled at every step.

Dynamo gives up only after hundreds of captures (`compat.CALL_OPTIONS`), and each takes seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from megacompile import compat, notices

_CALLS = 16  # the newest ones
_CAPTURED = 8  # so many of them: it is said


class CapturedAgain:
    """Says once of a model that many of its calls capture it anew, and why.

    Args:
        name: of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.said = False
        self._took_s: deque[float] = deque(maxlen=_CALLS)  # of each call: 0 if it captured nothing

    def note(self, compiled: Callable[..., Any], captured_s: float) -> None:
        """After a call that was not the first one.

        Args:
            compiled: what was called: a function that `torch.compile` gave.
            captured_s: what the call took in seconds, if it captured; otherwise 0.
        """
        if self.said:
            return
        self._took_s.append(captured_s)
        anew = [took_s for took_s in self._took_s if took_s]
        if len(anew) < _CAPTURED:
            return
        self.said = True
        why = compat.why_captured_again(compiled) or "TORCH_LOGS=recompiles says what"
        notices.warn(
            f"megacompile: {self.name} was captured anew in {len(anew)} of its last "
            f"{len(self._took_s)} calls, which took {sum(anew):.1f} s (slower, same numbers; said "
            f"once): what they were captured for did not hold ({why}); let fewer things "
            "change from call to call, or make them arguments, or tensors"
        )
