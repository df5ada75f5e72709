"""Sections of titles and rows, as a terminal shows them and as a notebook does."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

from megacompile.text import columns

_WIDTH = 100

Section = tuple[str, list[list[str]] | list[str]]  # a title, and columns or sentences


def as_text(title: str, sections: Sequence[Section]) -> str:
    """For a terminal."""
    lines = [title]
    for heading, rows in sections:
        lines += ["", heading] if heading else []
        lines += as_lines(rows)
    return "\n".join(lines)


def as_html(title: str, sections: Sequence[Section]) -> str:
    """For a notebook."""
    parts = [f"<h4>{html.escape(title)}</h4>"]
    for heading, rows in sections:
        parts.append(f"<h5>{html.escape(heading)}</h5>")
        cells = [row if isinstance(row, list) else [row] for row in rows]
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in cells
        )
        parts.append(f"<table>{body}</table>")
    return "\n".join(parts)


def as_lines(rows: Sequence[list[str]] | Sequence[str]) -> list[str]:
    """Columns, or texts with a dash each."""
    if rows and isinstance(rows[0], list):
        cells = [list(row) for row in rows]
        last = len(cells[0]) - 1
        words = (0, *(i for i in range(1, last + 1) if _is_words([row[i] for row in cells[1:]])))
        return ["  " + line for line in columns(cells, left=words).splitlines()]
    found = []
    for row in rows:
        found += textwrap.wrap(str(row), _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return found


def _is_words(cells: Sequence[str]) -> bool:
    return any(cell and not (cell[0].isdigit() or cell[0] in "+-?") for cell in cells)


def percent(part: float, whole: float) -> str:
    """ "71%"; "-" of nothing."""
    return f"{part / whole:.0%}" if whole else "-"


def short_count(number: float) -> str:
    """ "3.89 B": three significant digits, decimal units."""
    for unit in ("", " K", " M", " B"):
        if number < 999.5 or unit == " B":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def duration(seconds: float) -> str:
    """ "8.41 us", "1.26 s": three significant digits."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
