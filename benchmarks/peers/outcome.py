"""The outcome of one process: it measured, or it says why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """The end of a process; its value is what a table prints."""

    OK = "ok"
    NOT_INSTALLED = "not installed"
    REFUSED = "refused"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"
    NOT_TRIED = "not tried"


# A larger model, or less memory, ends in the same way.
TOO_LARGE = (Status.OUT_OF_MEMORY, Status.REFUSED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one process."""

    status: Status
    reason: str = ""  # one line; empty where it measured
    result: Mapping[str, Any] | None = None  # what `measure` gives
    package: str = ""  # "deepspeed 0.19.8"
    process_s: float = 0.0  # from its start to its end

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "status": self.status.value,
            "reason": self.reason,
            "package": self.package,
            "process_s": round(self.process_s, 1),
            "result": None if self.result is None else dict(self.result),
        }

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> Outcome:
        """The outcome that `as_json` wrote.

        Raises:
            KeyError, ValueError, TypeError: that is no outcome.
        """
        status = Status(values["status"])
        result = values["result"]
        if (status is Status.OK) != isinstance(result, Mapping):
            raise ValueError(f"status {status.value!r} with result {result!r}")
        return Outcome(
            status,
            str(values["reason"]),
            result,
            str(values["package"]),
            float(values["process_s"]),
        )


def one_line(text: str, limit: int = 200) -> str:
    """A text on one line that fits in a table."""
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
