"""Formatted text: sizes, times, names from outside, columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100
_LINE = re.compile(r'File "([^"]+)", line (\d+)[^\n]*\n\s*(\S[^\n]*)')


def printable(text: str) -> str:
    """Text on one line: newlines and other unprintable characters are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def source_line(traceback: str) -> str:
    """The last line of code in a traceback, as "net.py, line 31: `y = f(x)`", or ""."""
    lines = _LINE.findall(traceback)
    if not lines:
        return ""
    path, number, code = lines[-1]
    return f"{path}, line {number}: `{code.strip()}`"


def format_bytes(size_bytes: float) -> str:
    """ "1.09 GiB": three significant digits, binary units."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:  # a size that rounds to 1000 gets the next unit
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def duration(seconds: float) -> str:
    """ "8.41 us", "1.26 s": three significant digits."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


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


def columns(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,), between: str = "  ") -> str:
    """Align rows in columns: those in `left` to the left, others to the right."""
    flush = set(left)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if i in flush else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return between.join(cells).rstrip()

    return "\n".join(map(line, rows))


def as_lines(rows: Sequence[list[str]] | Sequence[str]) -> list[str]:
    """Lines of a table, or of texts with a dash each."""
    if rows and isinstance(rows[0], list):
        cells = [list(row) for row in rows]
        last = len(cells[0]) - 1
        figures = [*"+-?0123456789"]
        words = [
            i for i in range(last + 1) if any(r[i] and r[i][0] not in figures for r in cells[1:])
        ]
        return ["  " + line for line in columns(cells, left=(0, *words)).splitlines()]
    found = []
    for row in rows:
        found += textwrap.wrap(str(row), WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return found


def numbered(what: str, first: object, last: object) -> str:
    """`stage 3`, or `stages 3 to 7`."""
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"
