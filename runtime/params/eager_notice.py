"""Reports the parameters that user code reads in eager mode, where and why: one warning per cause.

Schedules stream the parameters of captured code. All other code fetches a parameter at each use,
unless it lives on the device: correct, but slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from megacompile import compat, notices
from megacompile.runtime.device.background import WeakIdSet
from megacompile.text import format_bytes


class EagerNotice:
    """The parameters of a model that eager code has used since the last call began.

    Owned by the model's `ModelBuckets`.

    Args:
        links: the links of used parameters with a pending backward.
    """

    def __init__(self, links: WeakIdSet[Any] | None = None) -> None:
        self._links: WeakIdSet[Any] = WeakIdSet() if links is None else links
        self.used = False  # by eager code, or an unknown caller
        self.read: set[int] = set()  # ids of all parameters that eager code has ever read
        self._ever: set[int] = set()  # ids of all parameters that eager code has used
        self.place = ""  # the first line that used one
        self.cause = ""  # why that was not captured
        self._params: set[int] = set()  # ids of the parameters
        self._said: set[str] = set()  # reported causes
        self._uncaptured = compat.uncaptured()  # their number when the last call ended
        self._asked = self._recorded = False  # in a call without capture; with gradients?

    @contextmanager
    def unless_it_raises(self) -> Iterator[None]:
        """Discard the uses by eager code in the block if it raises."""
        used, ever = self.used, self._ever.copy()
        try:
            yield
        except BaseException:
            self.used, self._ever = used, ever
            self.forget()
            raise

    @contextmanager
    def asked_for(self) -> Iterator[None]:
        """A block for a call without capture: no warning. Without gradients nothing is recorded
        either, because no link is used."""
        before = self._asked, self._recorded
        self._asked, self._recorded = True, torch.is_grad_enabled()
        try:
            yield
        finally:
            self._asked, self._recorded = before

    def forget(self) -> None:
        """Discard the uses of a call that raised."""
        self.place, self.cause, self._params = "", "", set()

    def __call__(self, param: torch.Tensor | None, link: Any) -> None:
        """Record a use of a parameter by eager code; None: a parameter of no model.

        Args:
            link: the link of a possible backward. None: no backward.
        """
        if link is not None and link.links is None:
            link.links = self._links
            self._links.add(link)
        self.read.add(id(param))
        if self._asked and not (self._recorded or torch.is_grad_enabled()):
            return
        self.used = True
        self._ever.add(id(param))
        if self._asked or compat.backward_id() != -1:  # reported by its forward
            return
        if self._said and compat.uncaptured() == self._uncaptured:
            return
        frames = _frames_of_user_code()
        if not frames:
            return
        if not self.place:
            at = frames[0]
            self.place = (
                f"{at.f_code.co_filename}:{at.f_lineno} ({compat.users_name(at.f_code.co_name)})"
            )
            self.cause = _cause(frames, compat.uncaptured() > self._uncaptured)
        self._params.add(id(param))

    @property
    def has_used_any(self) -> bool:
        """True if eager code has ever used a parameter."""
        return bool(self._ever)

    def has_used(self, param: torch.Tensor) -> bool:
        """True if eager code has ever used a parameter, as far as is known."""
        return id(param) in self._ever or id(None) in self._ever

    def say(self, params: Callable[[], Iterable[torch.nn.Parameter]], because: str = "") -> None:
        """Warn after a call of what it read in eager mode, once per cause.

        Args:
            params: returns all parameters of the model.
            because: the cause, if known. Default: the reason that Dynamo recorded.
        """
        place, cause, used = self.place, because or self.cause, self._params
        self.forget()
        self._uncaptured = compat.uncaptured()
        if not place or cause in self._said:
            return
        self._said.add(cause)
        notices.warn(
            f"megacompile: {place} runs in eager mode and fetches {share(params(), used)} at each "
            f"use, unless they are on the device (slower, same numbers; shown once): {cause}"
        )


def share(params: Iterable[torch.nn.Parameter], some: Iterable[int]) -> str:
    """The share of a model's parameters, given by ids, as text."""
    ids = set(some)
    every = {id(param): param.nbytes for param in params}
    part, whole = sum(every[i] for i in ids & every.keys()), sum(every.values())
    percent = 100 * part / max(whole, 1)
    return (
        f"{len(ids & every.keys())} of {len(every)} parameters ({format_bytes(part)} of "
        f"{format_bytes(whole)}, {percent:.0f} %)"
    )


def _frames_of_user_code() -> list[FrameType]:
    """The stack outward from the innermost line outside of megacompile and torch; empty in a
    captured graph or in Dynamo."""
    frame: FrameType | None = sys._getframe(1)
    found: list[FrameType] = []
    while frame is not None:
        if not found and compat.is_of_capture(frame):
            return []
        if found or compat.is_of_user(frame):
            found.append(frame)
        frame = frame.f_back
    return found


def _cause(frames: Iterable[FrameType], in_this_call: bool) -> str:
    """The reason why the code called by these frames (innermost first) was not captured.

    Args:
        in_this_call: Dynamo found something in this call that it could not capture.
    """
    frames = tuple(frames)
    if switch := compat.capture_is_off():
        return f"capture is disabled by {switch}; leave that out"
    breaks = tuple(compat.graph_breaks())
    lines = {(b.file, b.line): b for b in reversed(breaks)}
    limits = {hit.function: hit for hit in compat.limit_hits()}
    for frame in frames:
        code = frame.f_code
        if found := lines.get((code.co_filename, frame.f_lineno)):
            return _of_break(found)
        if failed := compat.untraced(code):
            return untraced_text(failed)
        name = f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})"
        if hit := limits.get(name):
            return (
                f"Dynamo has captured {hit.function} {hit.limit} times and gave up, because each "
                f"call differed ({hit.why.strip()}); keep it constant from call to call, or raise "
                f"torch._dynamo.config.{hit.option}"
            )
    for frame in frames:
        code = frame.f_code
        its = {line for _, _, line in code.co_lines()}
        for found in breaks:
            if found.file == code.co_filename and found.line in its:
                return _of_break(found)
    if in_this_call and breaks and not breaks[0].file:
        return f"a graph break: {breaks[0].why}; TORCH_LOGS=graph_breaks shows more"
    return "Dynamo did not capture it; TORCH_LOGS=graph_breaks shows why"


def untraced_text(failed: compat.Untraced) -> str:
    """The reason why code that Dynamo failed to trace runs in eager mode."""
    return f"Dynamo could not trace {failed.place}: {failed.why}; TORCH_LOGS=+dynamo shows more"


def _of_break(found: compat.GraphBreak) -> str:
    return (
        f"a graph break at {found.file}:{found.line} ({found.function}): {found.why}; "
        "TORCH_LOGS=graph_breaks shows more"
    )
