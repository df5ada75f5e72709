"""Whether Dynamo is asked to trace a call, where it could not trace the calls before.

A trace that fails takes as long as one that does not, and most often the next one fails too.
"""

from __future__ import annotations

_FIRST = 3  # calls in a row that are all tried
_MOST = 256  # calls between two tries


class Attempts:
    """Of one captured function: all calls at first, then every second, fourth, ... one."""

    def __init__(self) -> None:
        self.why_not = ""  # Dynamo could not trace the last call that was tried
        self._failed = 0  # in a row
        self._wait = 0  # calls until the next try

    def is_due(self) -> bool:
        """Is the call that begins one to try?"""
        if self._wait:
            self._wait -= 1
            return False
        return True

    def traced(self) -> None:
        """The call needed no trace, or it succeeded."""
        self._failed = self._wait = 0

    def failed(self, why: str) -> None:
        """Dynamo could not trace the call, and without it the call succeeded."""
        self.why_not = why
        self._failed += 1
        if self._failed >= _FIRST:
            self._wait = min(_MOST, 2 ** (self._failed - _FIRST + 1)) - 1
