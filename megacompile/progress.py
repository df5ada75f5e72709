"""What takes seconds on a large model: bars and a line on stderr that says what is waited for, and
in the log (MEGACOMPILE_LOG=time) how long each took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

from megacompile import log

_ERASE = "\r\x1b[K"  # to the end of the line


@dataclass(slots=True)
class _Line:
    """What is waited for."""

    is_shown: bool
    what: str = ""  # "": nothing
    since_s: float = 0.0


_lines: list[_Line] = []  # the outermost first


@contextmanager
def bar(
    what: str, total: int, show: bool | None, *, unit: str = "it"
) -> Iterator[Callable[[int], object]]:
    """A bar of `total` units; yields a function that advances it. `show=None`: on a terminal."""
    disable = None if show is None else not show
    now("")
    start = time.perf_counter()
    with tqdm(
        total=total,
        desc=f"megacompile: {what}",
        unit=unit,
        unit_scale=unit == "B",
        disable=disable,
        leave=False,
    ) as progress:
        yield progress.update
    log.took(what, time.perf_counter() - start)


@contextmanager
def line(what: str, show: bool | None) -> Iterator[None]:
    """A line that is gone at the end; `now` changes it. `show=None`: on a terminal."""
    _lines.append(_Line(sys.stderr.isatty() if show is None else show))
    try:
        now(what)
        yield
    finally:
        now("")
        _lines.pop()


def now(what: str) -> None:
    """Let the line say something else, if there is one: "" is nothing."""
    if not _lines or _lines[-1].what == what:
        return
    line, now_s = _lines[-1], time.perf_counter()
    if line.what:
        log.took(line.what, now_s - line.since_s)
    line.what, line.since_s = what, now_s
    if line.is_shown:
        print(f"{_ERASE}megacompile: {what} ..." if what else _ERASE, end="", file=sys.stderr)
        sys.stderr.flush()
