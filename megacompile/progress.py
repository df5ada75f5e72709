"""Progress bars and a status line on stderr, for work that takes seconds on a large model.

Without a terminal (a log file, a notebook), one line is printed once, if a wait is long.
MEGACOMPILE_LOG=time logs each duration.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm

from megacompile import log, notices

_ERASE = "\r\x1b[K"  # erases to the end of the line
_LONG_S = 5.0  # without a terminal, shorter waits are not printed


@dataclass(slots=True)
class _Line:
    """A status line of one thread."""

    is_shown: bool
    what: str = ""  # the current work; "": nothing
    since_s: float = 0.0
    took_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    thread: int = field(default_factory=threading.get_ident)  # the waiting thread

    def show(self) -> None:
        """Show the current work."""
        if self.is_shown:
            text = f"{_ERASE}megacompile: {self.what} ..." if self.what else _ERASE
            print(text, end="", file=sys.stderr, flush=True)


_lines: list[_Line] = []  # the outermost first


def _print_once(line: _Line) -> None:
    """Print the current work; once in this process."""
    if (what := line.what) and notices.is_new("a wait off a terminal"):
        print(
            f"megacompile: {what} ... (the first step may take minutes; shown once; "
            f"{log.VARIABLE}=time logs the time of each part)",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def bar(
    what: str, total: int, show: bool | None, *, unit: str = "it"
) -> Iterator[Callable[[int], object]]:
    """Show a bar of `total` units; yields a function that advances it. `show=None`: only on a
    terminal."""
    now("")
    start = time.perf_counter()
    options = {"disable": None if show is None else not show, "leave": False}
    text = f"megacompile: {what}"
    with tqdm(total=total, desc=text, unit=unit, unit_scale=unit == "B", **options) as progress:
        yield progress.update
    log.took(what, time.perf_counter() - start)


@contextmanager
def line(what: str, show: bool | None) -> Iterator[None]:
    """Show a status line until the end of the block; an outer line then reappears. `now` and
    `phase` change its text; `what=""` is empty until then. `show=None`: on a terminal, and
    elsewhere once if it takes long."""
    on_terminal = sys.stderr.isatty()
    mine = _Line(on_terminal if show is None else show)
    timer = threading.Timer(_LONG_S, _print_once, (mine,))
    timer.daemon = True
    if not on_terminal and show is None:
        timer.start()
    _lines.append(mine)
    try:
        now(what)
        yield
    finally:
        timer.cancel()
        now("")
        _lines.remove(mine)
        outer = _line()
        for each, time_s in mine.took_s.items():
            if outer is None:
                log.took(each, time_s)
            else:  # one figure for each kind of work, and no time counts twice
                outer.took_s[each] += time_s
                outer.since_s += time_s
        if outer is not None:
            outer.show()


def now(what: str) -> None:
    """Change the text of this thread's line, if any; "" clears it."""
    current = _line()
    if current is None or current.what == what:
        return
    now_s = time.perf_counter()
    if current.what:
        current.took_s[current.what] += now_s - current.since_s
    current.what, current.since_s = what, now_s
    current.show()


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Change the text of this thread's line, if any, within the block."""
    current = _line()
    outer = "" if current is None else current.what
    now(what)
    try:
        yield
    finally:
        now(outer)


def _line() -> _Line | None:
    """The innermost line of this thread, or None."""
    mine = threading.get_ident() if _lines else 0
    return next((line for line in reversed(_lines) if line.thread == mine), None)
