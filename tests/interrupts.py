"""Ctrl-C at any bytecode: `KeyboardInterrupt` raised before the n-th opcode of our code.

Ours are the frames of megacompile, of the code that it prints, and of `contextlib` that these call.
Those of torch are left alone, which does not promise to survive it; so are those of the adversarial
device, in whose place there is a GPU."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import megacompile
from megacompile import runtime

_PACKAGES = tuple(
    str(pathlib.Path(package.__file__ or "").parent) for package in (megacompile, runtime)
)


class Opcodes:
    """Counts the opcodes that run, and interrupts before one of them; 0: before none."""

    def __init__(self, interrupt_at: int = 0) -> None:
        self.count = 0
        self.interrupt_at = interrupt_at
        self.where = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        del arg
        if event == "call":
            if not is_ours(frame):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.count += 1
            if self.count == self.interrupt_at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt(self.where)
        return self


def is_ours(frame: FrameType) -> bool:
    """May it be interrupted?"""
    name = frame.f_code.co_filename
    if name == contextlib.__file__:
        return frame.f_back is not None and is_ours(frame.f_back)
    return name.startswith((*_PACKAGES, "<forward", "<backward"))


@contextlib.contextmanager
def traced(opcodes: Opcodes) -> Iterator[None]:
    """For its duration, in this thread."""
    before = sys.gettrace()
    sys.settrace(opcodes)
    try:
        yield
    finally:
        sys.settrace(before)
