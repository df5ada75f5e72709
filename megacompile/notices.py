"""Warnings that point at the user's line, from hooks, decorators and generated code too.

If ranks share a model, warnings that are the same in all ranks come from one of them; other
warnings name their rank. A subject identifies a warning that appears once for the process or for an
object (`warn_once`, `is_new`).
"""

from __future__ import annotations

import enum
import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from weakref import WeakKeyDictionary

# Packages whose frames are skipped: megacompile, and those that call it for the user's code.
_PASSED = frozenset(("megacompile", "torch", "contextlib", "functools", "threading", "concurrent"))


class Whose(enum.Enum):
    """The subject of a warning, where ranks share a model."""

    ALL = "the model or the program: the same in all ranks; the first rank warns"
    HOST = "a machine: its first rank warns"
    RANK = "this rank: the warning has its number"


_rank: tuple[int, bool, Callable[[], bool]] | None = None  # the arguments of `in_rank`


def in_rank(number: int, *, is_first: bool, is_there: Callable[[], bool]) -> None:
    """Register this process as a rank of a shared model; `is_first` of its mesh. `is_there` returns
    True while the process group exists."""
    global _rank
    if _rank is None or is_first or not _rank[2]():
        _rank = number, is_first, is_there


def warn(text: str, whose: Whose = Whose.ALL) -> None:
    """Warn at the innermost line outside of megacompile and torch; in a thread without one,
    here."""
    if _rank is not None and _rank[2]():
        number, is_first, _ = _rank
        if whose is Whose.ALL and not is_first:
            return
        if whose is Whose.HOST and os.environ.get("LOCAL_RANK", "0") != "0":
            return
        if whose is Whose.RANK:
            text = f"rank {number}: {text}"
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        frame.f_code.co_filename.startswith("<megacompile")  # generated Python
        or str(frame.f_globals.get("__name__", "")).partition(".")[0] in _PASSED
    ):
        frame = frame.f_back
    frame = frame or sys._getframe()
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno or 0,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
    del frame  # it may be this frame, and a cycle would keep the callers' objects alive


def warn_once(
    subject: str, text: str, whose: Whose = Whose.ALL, *, of: object | None = None
) -> None:
    """Warn, unless `is_new` was called with the subject (for the process, or for an object such as
    a model)."""
    if is_new(subject, of):
        warn(text, whose)


def is_new(subject: str, of: object | None = None) -> bool:
    """True for the first call with this subject, for the process or an object."""
    said = _said if of is None else _said_of.setdefault(of, set())
    is_first = subject not in said
    said.add(subject)
    return is_first


_said: set[str] = set()
_said_of: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()
