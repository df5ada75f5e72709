"""The table of loops: a row for each loop and engine."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.loops.catalogue import LOOPS
from benchmarks.loops.loop import Engine

LATE = 4  # the last steps, whose median is a late step
_TELLING = ("its own code", "eager mode")  # of what is said, what makes programs
_VALUE = re.compile(r"as \S+ did")


@dataclass(slots=True)
class Record:
    """The results of a loop and an engine."""

    loop: str
    engine: Engine
    steps: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None

    @staticmethod
    def of(loop: str, engine: Engine, among: Iterable[Record]) -> Record:
        """The record of a loop and an engine."""
        found = (each for each in among if (each.loop, each.engine) == (loop, engine))
        return next(found, Record(loop, engine))

    def by_step(self, count: str) -> str:
        """Counts by step, as "2 1 . . 1"."""
        text = " ".join(str(step[count] or ".") for step in self.steps)
        while text.endswith(" . ."):
            text = text.removesuffix(" .")
        return text

    def busy(self) -> list[int]:
        """Steps in which anything was captured or compiled."""
        return [s["index"] for s in self.steps if s["graphs"] or s["programs"] or s["compiled"]]

    def short(self) -> str:
        """The captures by step, in a line."""
        programs = f", programs {self.by_step('programs')}" if self.engine is Engine.OURS else ""
        return f"graphs {self.by_step('graphs')}{programs}"

    def reasons(self) -> dict[str, int]:
        """Reasons for code that is for some sizes alone, or was not made, with their counts."""
        found: dict[str, int] = {}
        for step in self.steps:
            for line in step["why"]:
                if any(word in line for word in _TELLING):
                    text = _VALUE.sub("as N did", line)
                    found[text] = found.get(text, 0) + 1
        return found

    def late_s(self) -> float:
        """Seconds of a late step."""
        times: list[float] = [step["time_s"] for step in self.steps[-LATE:]]
        return statistics.median(times)


def records(lines: Sequence[str]) -> list[Record]:
    """Read lines of JSON; a later run of a loop replaces an earlier one."""
    found: dict[tuple[str, str], Record] = {}
    for line in list(lines):
        event = json.loads(line)
        if "loop" not in event:
            continue
        key = event["loop"], event["engine"]
        again = key not in found or ("step" in event and event["step"]["index"] == 0)
        if again:
            found[key] = Record(event["loop"], Engine(event["engine"]))
        if "step" in event:
            found[key].steps.append(event["step"])
        else:
            found[key].outcome = event["outcome"]
    return list(found.values())


def difference(plain: Record, other: Record) -> float:
    """The largest difference of a loss, relative to the plain one."""
    worst = 0.0
    for mine, theirs in zip(plain.steps, other.steps, strict=False):
        for a, b in zip(mine["losses"], theirs["losses"], strict=True):
            off = abs(a - b) / max(abs(a), 1e-12)
            worst = max(worst, math.inf if math.isnan(off) and a == a else off if off == off else 0)
    return worst


def rows(of: Iterable[Record]) -> list[dict[str, object]]:
    """The cells of the table."""
    every = sorted(of, key=lambda record: list(LOOPS).index(record.loop))
    made = []
    for record in every:
        plain = Record.of(record.loop, Engine.PLAIN, every)
        status = record.outcome["status"] if record.outcome else "?"
        row: dict[str, object] = {"loop": record.loop, "engine": record.engine.value}
        if record.steps:
            row["first, s"] = f"{record.steps[0]['time_s']:.2f}"
            row["late, s"] = f"{record.late_s():.4f}"
            row["all, s"] = f"{sum(step['time_s'] for step in record.steps):.1f}"
        if record.steps and record.engine is not Engine.PLAIN:
            busy = record.busy()
            row["graphs"] = sum(step["graphs"] for step in record.steps)
            row["programs"] = (
                sum(step["programs"] for step in record.steps)
                if record.engine is Engine.OURS
                else ""
            )
            row["by step"] = record.by_step("graphs")
            row["steps with captures"] = f"{len(busy)}, last {busy[-1]}" if busy else "0"
            if plain.steps:
                off = difference(plain, record)
                drops = LOOPS[record.loop].drops and off > 1e-6
                row["losses off"] = f"{off:.0e}" + (" (dropout)" if drops else "")
        if status != "ok":
            reason = record.outcome["reason"] if record.outcome else ""
            row["end"] = f"{status}: {reason}" if reason else status
        made.append(row)
    return made
