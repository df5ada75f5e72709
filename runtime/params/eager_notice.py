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
    """The parameters of a model that eager code has used since the last call began. Owned by the
    model's `ModelBuckets`."""

    def __init__(self, links: WeakIdSet[Any] | None = None) -> None:
        # the links of used parameters with a pending backward
        self._links: WeakIdSet[Any] = WeakIdSet() if links is None else links
        self.read: set[int] = set()  # ids of all parameters that eager code has ever read
        self.ever: set[int] = set()  # ids of those with a possible backward; id(None): unknown
        self._place = self._cause = ""  # the first line that used one; why that was not captured
        self._params: set[int] = set()  # ids of the parameters to report
        self._said: set[str] = set()  # reported causes
        self._uncaptured = compat.uncaptured()  # graph breaks until the last call ended
        # in a call that is deliberately not captured: True if it computes gradients
        self._asked: bool | None = None

    @contextmanager
    def unless_it_raises(self) -> Iterator[None]:
        """Discard the uses by eager code in the block if it raises."""
        ever = self.ever.copy()
        try:
            yield
        except BaseException:
            self.ever = ever
            raise

    @contextmanager
    def asked_for(self) -> Iterator[None]:
        """Suppress warnings in a call that is deliberately not captured. Without gradients, uses
        are not recorded either, because no backward follows."""
        before, self._asked = self._asked, torch.is_grad_enabled()
        try:
            yield
        finally:
            self._asked = before

    def forget(self) -> None:
        """Discard the uses of a call that raised."""
        self._place, self._cause, self._params = "", "", set()

    def __call__(self, param: torch.Tensor | None, link: Any) -> None:
        """Record that eager code uses a parameter (None: it is outside of a model) and the link for
        its backward (None: no backward)."""
        if link is not None and link.links is None:
            link.links = self._links
            self._links.add(link)
        self.read.add(id(param))
        if self._asked is False and not torch.is_grad_enabled():
            return
        self.ever.add(id(param))
        if self._asked is not None or compat.backward_id() != -1:  # reported by its forward
            return
        if self._said and compat.uncaptured() == self._uncaptured:
            return
        # the stack outward from the innermost line outside of megacompile and torch
        frame: FrameType | None = sys._getframe()
        while frame is not None and not compat.is_of_capture(frame):
            if compat.is_of_user(frame):
                break
            frame = frame.f_back
        else:  # in a captured graph or in Dynamo
            return
        self._params.add(id(param))
        if not self._place:
            code = frame.f_code
            place = f"{code.co_filename}:{frame.f_lineno}"
            self._place = f"{place} ({compat.users_name(code.co_name)})"
            self._cause = "Dynamo did not capture it; TORCH_LOGS=graph_breaks shows why"
            breaks = compat.graph_breaks() if compat.uncaptured() > self._uncaptured else ()
            for at in breaks[:1]:  # the newest one, just before this line
                why = f"a graph break at {at.place}: {at.why}; TORCH_LOGS=graph_breaks shows more"
                self._cause = untraced_text(at) if at.untraced else why

    def say(self, params: Callable[[], Iterable[torch.nn.Parameter]], because: str = "") -> None:
        """After a call, warn of its reads in eager mode, once per cause. `because` replaces the
        cause that Dynamo recorded."""
        place, cause, used = self._place, because or self._cause, self._params
        self.forget()
        self._uncaptured = compat.uncaptured()
        if place and cause not in self._said:
            self._said.add(cause)
            notices.warn(
                f"megacompile: {place} runs in eager mode and fetches {share(params(), used)} at "
                f"each use, unless they are on the device (slower, same numbers; shown once): "
                f"{cause}"
            )


def share(params: Iterable[torch.nn.Parameter], some: Iterable[int]) -> str:
    """The share of a model's parameters, given by ids, as text."""
    every = {id(param): param.nbytes for param in params}
    ours = every.keys() & set(some)
    part, whole = sum(map(every.__getitem__, ours)), sum(every.values())
    return (
        f"{len(ours)} of {len(every)} parameters ({format_bytes(part)} of {format_bytes(whole)}, "
        f"{100 * part / max(whole, 1):.0f} %)"
    )


def untraced_text(failed: compat.Uncaptured) -> str:
    return f"Dynamo could not trace {failed.place}: {failed.why}; TORCH_LOGS=+dynamo shows more"
