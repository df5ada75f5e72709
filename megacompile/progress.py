"""What takes seconds on a large model, on stderr: bars, and a line that says what is waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

_ERASE = "\r\x1b[K"  # to the end of the line
_lines: list[str] = []  # what is waited for, the outermost first; "" is not shown any more


@contextmanager
def bar(
    what: str, total: int, show: bool | None, *, unit: str = "it"
) -> Iterator[Callable[[int], object]]:
    """A bar of `total` units; yields a function that advances it. `show=None`: on a terminal."""
    disable = None if show is None else not show
    now("")
    with tqdm(
        total=total,
        desc=f"megacompile: {what}",
        unit=unit,
        unit_scale=unit == "B",
        disable=disable,
        leave=False,
    ) as progress:
        yield progress.update


@contextmanager
def line(what: str, show: bool | None) -> Iterator[None]:
    """A line that is gone at the end; `now` changes it. `show=None`: on a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield
        return
    _lines.append("")
    try:
        now(what)
        yield
    finally:
        now("")
        _lines.pop()


def now(what: str) -> None:
    """Let the line say something else, if there is one: "" is nothing."""
    if _lines and _lines[-1] != what:
        _lines[-1] = what
        print(f"{_ERASE}megacompile: {what} ..." if what else _ERASE, end="", file=sys.stderr)
        sys.stderr.flush()
