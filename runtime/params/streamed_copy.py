"""What is streamed where that is a copy of the parameters in another dtype (`compute_dtype`).

The copy must follow the parameters, which the user may change at any time: a parameter that nobody
else guards has a guard for that (`Watch`).
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from megacompile import compat
from megacompile.runtime.params.bucket_guards import Watch
from megacompile.runtime.params.guards import guard, guard_of


class Copied(Protocol):
    """A bucket, as its copy sees it."""

    params: tuple[torch.nn.Parameter, ...]
    values: tuple[torch.Tensor, ...]
    streamed: tuple[torch.Tensor, ...]

    @property
    def has_copy(self) -> bool:
        """Is what is streamed a copy?"""

    def aliased(self, index: int) -> bool:
        """Does somebody hold a parameter's memory under another name?"""


class StreamedCopy:
    """The copy of one bucket's parameters; of a bucket without one, these do nothing.

    The bucket has this, and is referred to weakly.
    """

    def __init__(self, of: Copied) -> None:
        self._reference = weakref.ref(of)
        self._fresh: dict[int, int] = {}  # parameter -> its version when its copy was made

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

    def mark_fresh(self, index: int) -> None:
        """The copy of a parameter is what the parameter is now."""
        of = self._reference()
        if of is not None:
            self._fresh[index] = compat.version(of.params[index])

    def forget(self, index: int) -> None:
        """The user has a parameter in hands: its copy may be stale."""
        self._fresh.pop(index, None)

    def watch(self) -> None:
        """Notice changes that leave no trace in the version: those through `p.data`."""
        of = self._reference()
        if of is None or not of.has_copy:
            return
        for i, param in enumerate(of.params):
            if guard_of(param) is None and of.streamed[i] is not of.values[i]:
                guard(param, Watch(self, i))
