"""Ctrl-C at any bytecode: `KeyboardInterrupt` raised before an opcode of our code.

Ours are the frames of megacompile, of the code that it prints, and of `contextlib` that these call.
Those of torch are left alone, which does not promise to survive it; so are those of the adversarial
device, in whose place there is a GPU."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import megacompile
from megacompile import runtime

_PACKAGES = tuple(
    str(pathlib.Path(package.__file__ or "").parent) for package in (megacompile, runtime)
)


Place = tuple[str, int]  # a function, and one of the opcodes that it runs, from 1


class Opcodes:
    """Counts the opcodes that run, by function, and interrupts before one of them."""

    def __init__(self, stop_at: Place | None = None) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.stop_at = stop_at
        self.stopped = ""
        self._names: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        if event == "call":
            if not is_ours(frame):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            code = frame.f_code
            name = self._names.get(code)
            if name is None:
                name = f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"
                self._names[code] = name
            self.counts[name] += 1
            if self.stop_at == (name, self.counts[name]):
                self.stopped = f"{name}, line {frame.f_lineno}, opcode {frame.f_lasti}"
                raise KeyboardInterrupt(self.stopped)
        return self

    def any(self, rng: random.Random) -> Place:
        """One that was counted: each file is as likely as any other, and each function in it."""
        files = sorted({name.partition(":")[0] for name in self.counts})
        file = rng.choice(files)
        name = rng.choice(sorted(name for name in self.counts if name.partition(":")[0] == file))
        return name, rng.randint(1, self.counts[name])


@contextlib.contextmanager
def not_traced() -> Iterator[None]:
    """For the device, which no Ctrl-C reaches."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)


def is_ours(frame: FrameType) -> bool:
    """May it be interrupted?"""
    name = frame.f_code.co_filename
    if name == contextlib.__file__:
        return frame.f_back is not None and is_ours(frame.f_back)
    return name.startswith((*_PACKAGES, "<forward", "<backward"))


@contextlib.contextmanager
def traced(opcodes: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """For its duration, in this thread."""
    before = sys.gettrace()
    sys.settrace(opcodes)
    try:
        yield
    finally:
        sys.settrace(before)
