"""The file of a run: JSON that is whole after each point, so that a killed run keeps what it has.

    {"runs": [what it ran on], "planned": [points], "records": [{"run": 0, "point": .., "outcome"}]}

A run that is continued has several `runs`; each record says of which it is. They may be of several
machines; turns of one setting are of one (`driver.keep_apart`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.outcome import Outcome
from benchmarks.peers.work import Point

MACHINE = ("machine", "gpu", "cpus", "host GiB")  # of a run; the first is not in older files


@dataclass(frozen=True, slots=True)
class Record:
    """The outcome of one point."""

    point: Point
    outcome: Outcome
    run: int  # in the file's list


@dataclass(slots=True)
class Results:
    """All that a file has."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    planned: list[Point] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def plan(self, points: Iterable[Point]) -> None:
        """Add points that are going to be measured."""
        self.planned += [point for point in points if point not in self.planned]

    def of(self, point: Point) -> Record | None:
        """The record of a point."""
        return next((record for record in self.records if record.point == point), None)

    def same_machine(self, one: int, other: int) -> bool:
        """True if two runs are of one machine, as far as both say it."""
        a, b = self.runs[one], self.runs[other]
        return all(a[key] == b[key] for key in MACHINE if key in a and key in b)

    def is_here(self, record: Record) -> bool:
        """True if it is of the machine of the last run."""
        return self.same_machine(record.run, -1)

    def add(self, point: Point, outcome: Outcome) -> None:
        """A point of the last run."""
        self.records.append(Record(point, outcome, len(self.runs) - 1))

    def save(self, path: Path) -> None:
        """Write the file as a whole, or leave the old one."""
        values = {
            "runs": self.runs,
            "planned": [point.as_json() for point in self.planned],
            "records": [
                {"run": r.run, "point": r.point.as_json(), "outcome": r.outcome.as_json()}
                for r in self.records
            ],
        }
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(_text(values))
        os.replace(part, path)


def load(path: Path) -> Results:
    """Read a file that `save` wrote."""
    values: Mapping[str, Any] = json.loads(path.read_text())
    return Results(
        [dict(run) for run in values["runs"]],
        [Point.of_json(point) for point in values["planned"]],
        [
            Record(Point.of_json(r["point"]), Outcome.of_json(r["outcome"]), r["run"])
            for r in values["records"]
        ],
    )


def _text(values: Mapping[str, list[Any]]) -> str:
    """One point a line, so that two files can be compared."""
    parts = []
    for name, rows in values.items():
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        parts.append(f' "{name}": [\n{lines}\n ]' if rows else f' "{name}": []')
    return "{\n" + ",\n".join(parts) + "\n}\n"
