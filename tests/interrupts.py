"""Looks at calls of the functions of the product, Ctrl-C in them, and errors, without a patch.

Python's profiler is told of each call; what it raises is raised there. `KeyboardInterrupt` is
raised wherever Python 3.11 runs a signal handler: where a function begins, after a call, and where
a loop goes round; never between the last call of a `with` over a context manager in C and its
`__exit__`. Ours are the frames of megacompile, of the code that it prints, and of `contextlib` that
these call, but for those of the adversarial device.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import itertools
import pathlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import megacompile
from megacompile import runtime

_PACKAGES = tuple(
    str(pathlib.Path(package.__file__ or "").parent) for package in (megacompile, runtime)
)


Place = tuple[str, int]  # a function, and one of the places of an interrupt that it passes, from 1


class Places:
    """Counts the places of an interrupt that our code passes, by function, and interrupts at one.

    Args:
        stop_at: that one; None: nowhere.
        files: the names of those that count, without .py; none: all of ours.

    Attributes:
        passed: how many there were.
        stopped: where it was interrupted; "" if it was not.
    """

    def __init__(self, stop_at: Place | int | None = None, *files: str) -> None:
        """`stop_at` as a number: the place that is passed as the n-th, from 1."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.stop_at, self.files = stop_at, files
        self.passed = 0
        self.stopped = ""
        self._names: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        if event == "call":
            if not is_ours(frame) or not self._is_wanted(frame.f_code):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and frame.f_lasti in _places(frame.f_code):
            name = self._name(frame.f_code)
            self.counts[name] += 1
            self.passed += 1
            if self.stop_at in (self.passed, (name, self.counts[name])):
                self.stopped = f"{name}, line {frame.f_lineno}, opcode {frame.f_lasti}"
                raise KeyboardInterrupt(self.stopped)
        return self

    def _is_wanted(self, code: CodeType) -> bool:
        if code.co_name == "__del__":  # Python ignores what it raises
            return False
        return not self.files or pathlib.Path(code.co_filename).stem in self.files

    def _name(self, code: CodeType) -> str:
        if code not in self._names:
            place = f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"
            self._names[code] = place
        return self._names[code]

    def any(self, rng: random.Random) -> Place:
        """One that was counted: each file is as likely as any other, and each function in it."""
        files = sorted({name.partition(":")[0] for name in self.counts})
        file = rng.choice(files)
        name = rng.choice(sorted(name for name in self.counts if name.partition(":")[0] == file))
        return name, rng.randint(1, self.counts[name])


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
