"""Looks at calls of the functions of the product, Ctrl-C in them, and errors, without a patch.

Python's profiler is told of each call; what it raises is raised there. `KeyboardInterrupt` is
raised wherever Python 3.11 runs a signal handler: where a function begins, after a call, and where
a loop goes round; never between the last call of a `with` over a context manager in C and its
`__exit__`. Ours are the frames of megacompile, of the code that it prints, and of `contextlib` that
these call, but for those of the adversarial device.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import megacompile
from megacompile import runtime

_PACKAGES = tuple(
    str(pathlib.Path(package.__file__ or "").parent) for package in (megacompile, runtime)
)


class Places:
    """Counts the places of an interrupt that our code passes, and interrupts at one.

    Args:
        stop_at: that one, from 1; 0: nowhere.
        files: the names of those that count, without .py; none: all of ours.

    Attributes:
        passed: how many there were.
        stopped: where it was interrupted; "" if it was not.
    """

    def __init__(self, stop_at: int, *files: str) -> None:
        self.stop_at, self.files = stop_at, files
        self.passed = 0
        self.stopped = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call":
            if not is_ours(frame) or not self._is_wanted(frame.f_code):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self.passed += 1
            if self.passed == self.stop_at:
                code = frame.f_code
                place = f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}"
                self.stopped = f"{place}, opcode {frame.f_lasti}"
                raise KeyboardInterrupt(self.stopped)
        return self

    def _is_wanted(self, code: CodeType) -> bool:
        if code.co_name == "__del__":  # Python ignores what it raises
            return False
        return not self.files or pathlib.Path(code.co_filename).stem in self.files


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """The offsets of the opcodes before which a Ctrl-C may come."""
    bytecode = dis.Bytecode(code)
    entries: Any = bytecode.exception_entries  # type: ignore[attr-defined]

    def handler(offset: int) -> tuple[int, int] | None:
        return next(((e.target, e.depth) for e in entries if e.start <= offset < e.end), None)

    opcodes = list(bytecode)
    places = {
        after.offset
        for before, after in itertools.pairwise(opcodes)
        if before.opname in ("RESUME", "CALL", "CALL_FUNCTION_EX")
        and handler(before.offset) == handler(after.offset)
    }
    return frozenset(places | {each.argval for each in opcodes if "JUMP_BACKWARD" in each.opname})


def is_ours(frame: FrameType) -> bool:
    """May it be interrupted?"""
    name = frame.f_code.co_filename
    if name == contextlib.__file__:
        return frame.f_back is not None and is_ours(frame.f_back)
    return name.startswith((*_PACKAGES, "<forward", "<backward"))


@contextlib.contextmanager
def traced(places: Callable[[FrameType, str, Any], Any] | None) -> Iterator[None]:
    """For its duration, in this thread; None: no Ctrl-C comes, as none reaches the device."""
    before = sys.gettrace()
    sys.settrace(places)
    try:
        yield
    finally:
        sys.settrace(before)


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
    """For its duration, calls of some functions are looked at, until a look raises."""
    by_code = {function.__code__: look for function, look in looks.items()}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in by_code:
            by_code[frame.f_code](frame)

    with profiled(profile):
        yield
