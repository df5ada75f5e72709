"""Copies of the parameters that must follow them: that in another dtype (`compute_dtype`), which is
streamed instead of them, and those that stay in slots on the device between two forwards.

The user may change a parameter at any time: one without another guard has a guard for that
(`Watch`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Protocol

import torch

from megacompile import compat
from megacompile.runtime.params.guards import Watch, guard, guard_of


class Copied(Protocol):
    """A bucket, as its copy sees it."""

    params: tuple[torch.nn.Parameter, ...]
    values: tuple[torch.Tensor, ...]
    streamed: tuple[torch.Tensor, ...]

    @property
    def has_copy(self) -> bool:
        """True if what is streamed is a copy."""

    def aliased(self, index: int) -> bool:
        """True if a parameter's memory is held under another name."""


@dataclass(frozen=True, slots=True)
class CopyMark:
    """The parameters of a bucket as they were at one time."""

    copy: StreamedCopy
    changes: int
    versions: tuple[int, ...]

    def holds(self) -> bool:
        """True if they are so still."""
        return self.copy.is_as_at(self)


class StreamedCopy:
    """The copies of one bucket's parameters; where there are none, these do nothing.

    The bucket has this, and is referred to weakly.
    """

    def __init__(self, of: Copied) -> None:
        self._reference = weakref.ref(of)
        self._fresh: dict[int, int] = {}  # parameter -> its version when its copy was made
        self._changes = 0  # times that one may have changed
        self._marked = False  # is there a copy on the device?

    def mark(self) -> CopyMark | None:
        """The parameters as they are now; None where a change could go unseen."""
        of = self._reference()
        if of is None:
            return None
        self._marked = True
        self.watch()
        if any(guard_of(p) is None or of.aliased(i) for i, p in enumerate(of.params)):
            return None
        return CopyMark(self, self._changes, self._versions())

    def _versions(self) -> tuple[int, ...]:
        of = self._reference()
        return () if of is None else tuple(map(compat.version, of.params))

    def changed(self) -> None:
        """The parameters are written to."""
        self._changes += 1

    def is_as_at(self, mark: CopyMark) -> bool:
        """True if the parameters are what they were then."""
        return self._changes == mark.changes and self._versions() == mark.versions

    def refresh(self, *, idle: bool) -> None:
        """Bring the copy up to date with what the user changed.

        Args:
            idle: nothing is in flight for the bucket.
        """
        of = self._reference()
        if of is None or not of.has_copy:
            return
        for i, param in enumerate(of.params):
            if of.streamed[i] is of.values[i]:
                continue
            fresh = self._fresh.get(i) == compat.version(param)
            if not fresh or (idle and of.aliased(i)):
                of.streamed[i].copy_(of.values[i])
                if of.aliased(i):
                    self.forget(i)  # a write under the other name would go unseen
                else:
                    self.mark_fresh(i)
        self.watch()

    def take_back(self, index: int) -> None:
        """Bring a master up to date with its copy, which eager code wrote to."""
        of = self._reference()
        if of is not None and of.streamed[index] is not of.values[index]:
            of.values[index].copy_(of.streamed[index])
        self.changed()

    def mark_fresh(self, index: int) -> None:
        """The copy of a parameter is what the parameter is now."""
        of = self._reference()
        if of is not None:
            self._fresh[index] = compat.version(of.params[index])

    def forget(self, index: int) -> None:
        """The user has a parameter in hands: its copy may be stale."""
        self._fresh.pop(index, None)
        self.changed()

    def watch(self) -> None:
        """Notice changes that leave no trace in the version: those through `p.data`."""
        of = self._reference()
        if of is None or not (of.has_copy or self._marked):
            return
        for i, param in enumerate(of.params):
            copied = self._marked or of.streamed[i] is not of.values[i]
            if copied and guard_of(param) is None:
                guard(param, Watch(self, i))
