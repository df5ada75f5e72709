"""Frames that Dynamo captures, the progress of a call, and reasons for not capturing a frame."""

from __future__ import annotations

import os
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch._dynamo import convert_frame
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.types import ConvertFrameReturn
from torch.utils.weak import WeakIdKeyDictionary

from megacompile.compat.dynamo import CAPTURE_ERRORS, uncompiled
from megacompile.compat.patches import replace

_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


def is_of_capture(frame: types.FrameType) -> bool:
    """True if a frame runs a graph's generated code, or Dynamo itself."""
    generated = "eval_with_key" in frame.f_code.co_filename
    return generated or frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"


def is_of_user(frame: types.FrameType) -> bool:
    """True if a frame's code is neither torch's nor megacompile's."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in ("torch", "megacompile")


def is_called_by_user() -> bool:
    """True if user code called the caller, directly or through a Python method of a tensor."""
    frame = sys._getframe(2)
    return is_of_user(frame) or frame.f_globals.get("__name__") == "torch._tensor"


def is_called_first(code: types.CodeType) -> bool:
    """True if a call of this code got here before a line of the user ran, except captured ones.
    False in a frame that Dynamo resumed: another graph ran before it."""
    return _has_begun(code, sys._getframe(1)) is False


def _has_begun(
    code: types.CodeType, frame: types.FrameType | None, *, begun: bool = False
) -> bool | None:
    """True if a line of the user ran between a call of this code and `frame`; None if no call."""
    while frame is not None and frame.f_code is not code:
        begun |= _has_run(frame)
        frame = frame.f_back
    return None if frame is None else begun


def is_raised_first(error: BaseException) -> bool:
    """True if Dynamo raised an error, caught here, before a line of the user ran. False in a frame
    that Dynamo resumed: another graph ran before it."""
    at, captures = error.__traceback__, False
    while at is not None:
        if _has_run(at.tb_frame):
            return False
        captures |= at.tb_frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"
        at = at.tb_next
    return captures


def _has_run(frame: types.FrameType) -> bool:
    """True if a frame on the stack runs user code, or resumes it after a graph break."""
    return is_of_user(frame) or _is_resumed(frame.f_code)


def _is_resumed(code: types.CodeType) -> bool:
    """True if Dynamo generated this code for the lines after a graph break."""
    return users_name(code.co_name) != code.co_name


def users_name(name: str) -> str:
    """The user's name of a function that Dynamo resumed: "forward" for
    "torch_dynamo_resume_in_forward_at_12"."""
    return _RESUMED.sub(r"\1", name)


_KEPT = 1000  # graph breaks of the process; drops the oldest
_TRIES = 3  # failed traces of one code object: the input may have been the reason


class Uncaptured(NamedTuple):
    """A line of user code that Dynamo could not capture, or that calls code that it could not."""

    file: str  # "" if unknown, or if the whole stack is torch's and megacompile's
    line: int
    function: str
    why: str
    untraced: bool = False  # True: tracing failed; False: a graph break

    @property
    def place(self) -> str:
        """ "file.py:12 (forward)"; "it" if unknown."""
        return f"{self.file}:{self.line} ({self.function})" if self.file else "it"


def _uncaptured(stack: Iterable[tuple[str, Any, str]], why: str) -> Uncaptured:
    """The innermost line of the user in a stack of (file, line, function)."""
    file, line, function = ([at for at in stack if not at[0].startswith(_NOT_USERS)] or [_NONE])[-1]
    return Uncaptured(file, int(line or 0), users_name(function), why)


def note_uncaptured() -> None:
    """Records every graph break from now on, for `graph_breaks`: Dynamo's own list lacks those that
    make it skip a whole function (in a loop, in `try`)."""

    def log_graph_break(stock: Any, self: Any, code_options: Any, reason: str, exc: Any) -> None:
        stack = getattr(exc, "real_stack", None) or torch._guards.TracingContext.extract_stack()
        if stack:
            why = (str(getattr(exc, "msg", "")) or reason).strip().partition("\n")[0]
            _BREAKS.append(_uncaptured(((at.filename, at.lineno, at.name) for at in stack), why))
            _COUNT[0] += 1
        stock(self, code_options, reason, exc)

    replace(InstructionTranslatorBase, "log_graph_break", log_graph_break)


def skip_untraced(within: types.CodeType) -> None:
    """Runs untraceable code in eager mode, in calls of the code `within`, if lines of the user have
    already run: such a call cannot start over without Dynamo. Dynamo skips the frame as after a
    graph break."""

    def convert(stock: Any, self: Any, frame: Any, *args: Any, skip: int = 0) -> Any:
        try:
            found = stock(self, frame, *args, skip=skip + 2)
        except CAPTURE_ERRORS as error:
            at, begun = sys._getframe(), _is_resumed(frame.f_code)
            if not any(_has_begun(code, at, begun=begun) for code in _within):
                raise
            tries = _untraced.get(frame.f_code, 0)
            _untraced[frame.f_code] = tries + 1
            _BREAKS.append(untraced_by(error))
            _COUNT[0] += 1
            return ConvertFrameReturn(apply_to_code=tries + 1 == _TRIES)
        _untraced.pop(frame.f_code, None)
        return found

    replace(convert_frame.ConvertFrame, "__call__", convert)
    _within.add(within)


def untraced_by(error: Exception) -> Uncaptured:
    """Returns where and why Dynamo raised one of `CAPTURE_ERRORS`, on one line."""
    text = str(error).strip()
    of_operator = re.search(r"with fake tensors: \w+ (.+?)\(\*.*: got (.+)", text)
    why = text.partition("\n")[0] if of_operator is None else ": ".join(of_operator.groups())
    return _uncaptured(_AT.findall(text.partition("from user code:")[2]), why)._replace(
        untraced=True
    )


def graph_breaks() -> tuple[Uncaptured, ...]:
    """Graph breaks since `note_uncaptured`, and failures that `skip_untraced` skipped, newest
    first."""
    return tuple(reversed(_BREAKS))


def uncaptured() -> int:
    """Number of graph breaks and failed traces since `note_uncaptured`."""
    return _COUNT[0]


def why_captured_again(compiled: Callable[..., Any]) -> str:
    """The guard that failed in the newest earlier capture, in Dynamo's words; "" if unknown."""
    failures = torch._dynamo.utils.guard_failures.get(uncompiled(compiled).__code__, [])
    # of the capture with the largest number: 3 for "0/3: ..."
    number: Any = re.compile(r"\d+/(\d+)|").match
    newest = max(failures, key=lambda text: int(number(text)[1] or -1), default="")
    newest = newest.partition("\n")[0]
    return newest.partition(": ")[2].partition("  #")[0].strip()  # without the source line, a hint


_NOT_USERS = tuple(
    os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__))
)
_NONE = "", 0, ""
_AT = re.compile(r'File "(.+)", line (\d+), in (\S+)')  # of a traceback
_COUNT = [0]
_within: set[types.CodeType] = set()
_untraced = WeakIdKeyDictionary()  # code -> failures in a row
_BREAKS: deque[Uncaptured] = deque(maxlen=_KEPT)
