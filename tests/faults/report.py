"""What the trials gave: a table of folders and tiers, the survivors, JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.trial import End, Result

_OTHERS = (End.SURVIVED, End.UNREACHED, End.UNFINISHED)


def read(path: Path) -> list[Result]:
    """Results of an earlier run; none where there is no such file."""
    return (
        [Result.from_json(each) for each in json.loads(path.read_text())] if path.exists() else []
    )


def write(path: Path, results: Sequence[Result]) -> None:
    """Replace the file: whoever stops the run keeps what is done."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps([result.to_json() for result in results], indent=1) + "\n")
    new.replace(path)


def line(result: Result) -> str:
    """One result, for the progress."""
    where = f" {result.test}" if result.test else ""
    return f"{result.fault}: {result.end.value}{where} ({result.ran} tests, {result.time_s:.0f} s)"


def table(faults: Sequence[Fault], results: Sequence[Result]) -> str:
    """How many faults of each folder each tier caught."""
    folders = {fault.id: fault.folder for fault in faults}
    cells = Counter(
        (folders[result.fault], result.tier if result.end.caught else result.end.value)
        for result in results
    )
    seen = {column for _, column in cells}
    last = [end.value for end in _OTHERS if end.value in seen]
    columns = [*sorted(seen - set(last)), *last]
    rows = [["folder", "faults", *columns]]
    for folder in sorted({folder for folder, _ in cells}):
        counts = [cells[folder, column] for column in columns]
        rows.append([folder, str(sum(counts)), *(str(count or "") for count in counts)])
    totals = [sum(n for (_, each), n in cells.items() if each == column) for column in columns]
    rows.append(["all", str(sum(totals)), *map(str, totals)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


def survivors(faults: Sequence[Fault], results: Sequence[Result]) -> str:
    """The faults that no test caught, each with what goes wrong."""
    ends = {result.fault: result for result in results if not result.end.caught}
    lines = []
    for fault in faults:
        if result := ends.get(fault.id):
            how = f"{result.end.value}; {result.reached} tests reach it, {result.ran} were run"
            lines.append(f"{fault.id} ({fault.path}): {how}\n    {fault.wrong}")
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
    ends = Counter(result.end for result in results)
    caught = sum(count for end, count in ends.items() if end.caught)
    parts = ", ".join(f"{ends[end]} {end.value}" for end in End if ends[end])
    return f"{caught} of {len(results)} faults caught ({parts})"
