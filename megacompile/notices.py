"""Warnings that point at the user's line.

A warning may come from hooks, decorators and generated code, so the number of frames up to the
user's code is not known where the text is written. It is found by looking at the frames.

Where ranks share a model, one of them says what is the same in all; other warnings name their rank.
What is said once, of the process or of an object, goes by a subject (`warn_once`, `is_new`).
"""

from __future__ import annotations

import enum
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from weakref import WeakKeyDictionary

# Packages whose lines are no help: ours, and those that call us on behalf of the user's code.
_PASSED = frozenset(("megacompile", "torch", "contextlib", "functools", "threading", "concurrent"))


class Whose(enum.Enum):
    """The subject of a warning, where ranks share a model."""

    ALL = "the model, or the program: the same in all ranks, and the first one says it"
    HOST = "a machine: its first rank says it"
    RANK = "this rank: it says so, with its number"


@dataclass(frozen=True, slots=True)
class _Rank:
    """This process among those that share models."""

    number: int
    is_first: bool
    is_there: Callable[[], bool]  # does the process group still exist?


_rank: _Rank | None = None


def in_rank(number: int, *, is_first: bool, is_there: Callable[[], bool]) -> None:
    """From now on this process is a rank of those that share a model.

    Args:
        number: its rank.
        is_first: is it the first one of its mesh?
        is_there: does the process group still exist?
    """
    global _rank
    if _rank is None or not _rank.is_there() or is_first:
        _rank = _Rank(number, is_first, is_there)


def warn(text: str, whose: Whose = Whose.ALL) -> None:
    """Warn at the innermost line that is neither ours nor torch's; in a thread that has none, here.

    Args:
        text: of the warning.
        whose: what it is about, which says which ranks show it.
    """
    if _rank is not None and _rank.is_there():
        if whose is Whose.ALL and not _rank.is_first:
            return
        if whose is Whose.HOST and os.environ.get("LOCAL_RANK", "0") != "0":
            return
        if whose is Whose.RANK:
            text = f"rank {_rank.number}: {text}"
    frame = _users_frame() or sys._getframe()
    warnings.warn_explicit(
        text,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno or 0,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
    del frame  # it may be this one: a frame that names itself keeps what its callers have alive


def warn_once(
    subject: str, text: str, whose: Whose = Whose.ALL, *, of: object | None = None
) -> None:
    """Warn, unless there was a warning of the subject before.

    Args:
        subject: names the warning.
        text: as for `warn`.
        whose: as for `warn`.
        of: the object that the warning is about, such as a model: each gets its own. Default: the
            process.
    """
    if is_new(subject, of):
        warn(text, whose)


def is_new(subject: str, of: object | None = None) -> bool:
    """True for the first caller that asks about a subject, of the process or of an object."""
    said = _said if of is None else _said_of.setdefault(of, set())
    is_first = subject not in said
    said.add(subject)
    return is_first


def was_said(subject: str) -> bool:
    """True if a caller has asked `is_new` about a subject of the process."""
    return subject in _said


def say_again() -> None:
    """Forget all subjects of the process."""
    _said.clear()


_said: set[str] = set()
_said_of: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def _users_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_passed(frame):
        frame = frame.f_back
    return frame


def _is_passed(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith("<megacompile"):  # the Python of a schedule or a stage
        return True
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _PASSED
