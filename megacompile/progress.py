"""Progress bars and a status line on stderr, for work that takes seconds on a large model.

Without a terminal (a log file, a notebook), a line tells of each work that takes seconds, in the
first of several ranks. MEGACOMPILE_LOG=time logs each duration.
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

from megacompile import log
from megacompile.option_values import torchrun_count
from megacompile.text import duration

_ERASE = "\r\x1b[K"  # erases to the end of the line
_LONG_S = 1.5  # without a terminal, shorter waits are not printed


@dataclass(slots=True)
class _Line:
    """A status line of one thread."""

    is_shown: bool  # on a terminal
    is_printed: bool = False  # elsewhere: a line for each work that took long
    announced: str = ""  # the work whose beginning was printed
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


def tell(text: str) -> None:
    """Print a line, in the first of several ranks. This thread's line then reappears."""
    if not torchrun_count("RANK"):
        current = _line()
        shown = current is not None and current.is_shown
        print(f"{_ERASE * shown}megacompile: {text}", file=sys.stderr, flush=True)
        if current is not None:
            current.show()


def _begin_to_print(line: _Line) -> None:
    """Print the current work, which takes long, and from now on what each work took."""
    line.is_printed, line.announced = True, line.what
    if line.announced:
        tell(f"{line.announced} ...")


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
    elsewhere what takes long."""
    on_terminal, outer = sys.stderr.isatty(), _line()
    if outer is not None and what and outer.what == what:  # the outer line says so already
        with phase(what):
            yield
        return
    printed = outer is not None and outer.is_printed
    mine = _Line(on_terminal if show is None else show, printed)
    timer = threading.Timer(_LONG_S, _begin_to_print, (mine,))
    timer.daemon = True
    if not on_terminal and show is None and outer is None:
        timer.start()
    _lines.append(mine)
    try:
        now(what)
        yield
    finally:
        timer.cancel()
        now("")
        _lines.remove(mine)
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
        time_s = now_s - current.since_s
        current.took_s[current.what] += time_s
        if current.is_printed and (time_s >= _LONG_S or current.what == current.announced):
            tell(f"{current.what} took {duration(time_s)}")
            current.announced = ""
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
