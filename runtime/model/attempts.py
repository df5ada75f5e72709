"""Decides if a call is traced, or its graph scheduled, where that failed for the calls before.

What fails takes as long as what does not, and most often the next one fails too.
"""

from __future__ import annotations

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
