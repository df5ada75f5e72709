"""docs/zoo.md: what `make zoo` found of every model, and how it is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.zoo.compare import Result
from tests.zoo.entry import Entry, Family

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
_MADE = "Made with "
COLUMNS = ("model", "graph breaks", "stages", "streamed", "largest error", "Inductor", "why")

INTRODUCTION = PAGE.read_text().partition("\n" + _MADE)[0]  # is written there alone


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, as text."""

    name: str
    breaks: str
    stages: str
    streamed: str
    error: str
    inductor: str
    why: str

    @staticmethod
    def of(entry: Entry, result: Result) -> Row:
        """The line for an entry."""
        whys = [entry.note, entry.rounding.why if entry.rounding and result.error else ""]
        return Row(
            entry.name,
            str(result.breaks) if result.breaks >= 0 else "no graph",
            str(result.stages),
            percent(result.streamed),
            rounded_up(result.error),
            "",
            "; ".join(why for why in whys if why),
        )

    def line(self) -> str:
        """In Markdown."""
        cells = (
            *(self.name, self.breaks, self.stages, self.streamed, self.error),
            *(self.inductor, self.why),
        )
        return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def percent(share: float) -> str:
    """100 % only where it is all."""
    return f"{math.floor(share * 100)} %"


def rounded_up(error: float) -> str:
    """0, or the next power of ten."""
    return "0" if error == 0 else f"1e{math.ceil(math.log10(error))}"


def page(rows: Mapping[Family, Sequence[Row]], versions: str) -> str:
    """The whole of docs/zoo.md."""
    parts = [INTRODUCTION, f"{_MADE}{versions}.\n"]
    for family, of_family in rows.items():
        if of_family:
            parts += [f"## {family.value}\n", "\n".join(_table(of_family)) + "\n"]
    return "\n".join(parts)


def _table(rows: Iterable[Row]) -> list[str]:
    head = f"| {' | '.join(COLUMNS)} |"
    return [head, "|---" * len(COLUMNS) + "|", *(row.line() for row in rows)]


def versions_of(text: str) -> str:
    """The packages that a page was made with."""
    made = next((line for line in text.splitlines() if line.startswith(_MADE)), _MADE)
    return made.removeprefix(_MADE).removesuffix(".")


def rows_of(text: str) -> dict[str, Row]:
    """The rows of a page, by model."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == len(COLUMNS) and cells[0] not in ("model", "---"):
            found[cells[0]] = Row(*cells)
    return found


def changes(found: Mapping[str, Row], text: str) -> list[str]:
    """How what was found differs from a page, one line each; errors that are not 0 may vary."""
    written = rows_of(text)
    said = []
    for name, row in found.items():
        if name not in written:
            said.append(f"{name}: not on the page")
        elif _facts(row) != _facts(written[name]):
            said.append(f"{name}: the page says {written[name].line()}, found {row.line()}")
    return said


def _facts(row: Row) -> tuple[str, ...]:
    return (row.breaks, row.stages, row.streamed, "0" if row.error == "0" else "", row.why)
