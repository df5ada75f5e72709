"""Looks at calls of the product's functions, and lets one fail, without a patch.

Python's profiler is told of each call: it sees the arguments, and what it raises is raised there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

Look = Callable[[FrameType], None]


@contextlib.contextmanager
def profiled(profile: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """For its duration, this is the profiler of this thread."""
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def watched(looks: Mapping[Any, Look]) -> Iterator[None]:
    """For its duration, this thread's calls of some functions are looked at before they begin.

    Once a look has raised, nothing more is looked at.
    """
    by_code = {function.__code__: look for function, look in looks.items()}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        del argument
        if event == "call" and frame.f_code in by_code:
            by_code[frame.f_code](frame)

    with profiled(profile):
        yield


class Countdown:
    """Lets the nth call of a function fail; counts them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0

    @contextlib.contextmanager
    def failing(self, nth: int = -1, error: BaseException | None = None) -> Iterator[None]:
        """Of the calls in this block; without `nth`, none."""
        self.calls = 0

        def look(frame: FrameType) -> None:
            del frame
            self.calls += 1
            if self.calls - 1 == nth and error is not None:
                raise error

        with watched({self.function: look}):
            yield
