"""The record of one gradient in one call of `backward()`, and its norms."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from megacompile.host_memory import pinned_empty
from megacompile.runtime.device.ranks import Ranks


class GradRoute(enum.Enum):
    """The route of one gradient of a captured graph.

    WRITE        into the bucket, whose memory autograd takes as `p.grad` without a copy
    ACCUMULATE   the bucket has a gradient already: the device adds, and the total goes into the
                 bucket. It was `p.grad`, which is taken away, and autograd gets the total
    ACCUMULATE_SAME_PASS
                 the same where the gradient so far is that of an earlier graph in this very
                 backward: autograd has its memory already, and gets nothing more
    SEPARATE     into memory of its own, and autograd adds: the difference could be seen
    DISCARD      nowhere: autograd does not ask for it
    """

    WRITE = enum.auto()
    ACCUMULATE = enum.auto()
    ACCUMULATE_SAME_PASS = enum.auto()
    SEPARATE = enum.auto()
    DISCARD = enum.auto()

    @property
    def in_bucket(self) -> bool:
        """True if autograd gets the bucket's memory."""
        return self is GradRoute.WRITE or self is GradRoute.ACCUMULATE

    @property
    def adds(self) -> bool:
        """True if the device adds to the gradient so far."""
        return self is GradRoute.ACCUMULATE or self is GradRoute.ACCUMULATE_SAME_PASS


class Wish(enum.Enum):
    """The request of autograd for one gradient."""

    ACCUMULATE = enum.auto()
    SHOW = enum.auto()  # a hook sees it
    RETURN = enum.auto()  # `autograd.grad()` was called for it: nothing is added to it
    NONE = enum.auto()


class Others(enum.Enum):
    """The other users of a parameter in the same backward."""

    NONE = enum.auto()
    GRAPHS = enum.auto()  # captured ones, or the same one twice
    CODE = enum.auto()  # not captured; or it is not known


class ParamUse(NamedTuple):
    """The use of one parameter in a backward."""

    wish: Wish = Wish.ACCUMULATE
    others: Others = Others.NONE


USUAL = ParamUse()


class GradientRecord:
    """The gradient of one parameter in one call of `backward()`; its `BackwardPass` has it.

    The values of the class are those of the usual case: a first gradient, of one captured graph.
    They are set on an object where they differ, so that nothing is called to make one.
    """

    # for the captured graph whose backward runs, or has run last
    use = USUAL
    route = GradRoute.WRITE
    joined = False  # does autograd add to a `p.grad` that is not in the bucket?
    separate: torch.Tensor | None = None  # memory of its own
    kept = False  # by a bucket that lives on the device
    done = False  # by an attempt that ran out of memory
    # for the end of `backward()`
    memory: torch.Tensor | None = None  # that autograd has
    in_bucket = False  # is that memory the bucket's?
    first = False  # was there no `p.grad` before?
    watched = False  # is it read before the end?
    before: torch.Tensor | None = None  # `p.grad`, which the total replaces
    summed: bool | None = None  # over replicas; False: by a later backward; None: it is not ours
    updated = False  # by an update in the backward
    norms: Norms | None = None  # that such an update has taken

    @property
    def is_seen(self) -> bool:
        """True if the gradient of the graph is read before `backward()` returns."""
        return self.joined or self.use.wish is Wish.SHOW or self.use.others is Others.CODE


class Norms:
    """The norms of a bucket's gradients, on their way to the host or on the device.

    Args:
        indices: of the parameters.
    """

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices = indices
        self._copied: torch.cuda.Event | None = None  # after the copy, or after the norms
        self._buffer: torch.Tensor | None = None
        self._values: list[list[float]] = []

    def fill(
        self,
        norms: torch.Tensor,  # (2 or 1, len(indices)) float32, device: L2 norms, largest values
        queue: torch.cuda.Stream | None,
    ) -> None:
        """Copy them on a stream."""
        make = torch.empty if queue is None else pinned_empty
        self._buffer = make(tuple(norms.shape), dtype=norms.dtype)
        self._buffer.copy_(norms, non_blocking=True)
        if queue is not None:
            self._copied = queue.record_event()

    def keep(
        self,
        norms: torch.Tensor,  # as `fill` takes them
        made: torch.cuda.Event | None,
    ) -> None:
        """Leave them on the device until they are asked for; `made` is after them."""
        self._buffer, self._copied = norms, made

    def get(self, k: int) -> tuple[float, ...]:
        """The L2 norm and, if it was taken, the largest absolute value of the k-th gradient."""
        return tuple([row[k] for row in self.rows()])

    def rows(self) -> list[list[float]]:
        """L2 norms and, if they were taken, the largest values."""
        if not self._values:
            assert self._buffer is not None, "norms that no op has taken"
            if self._copied is not None:
                self._copied.synchronize()
            self._values = self._buffer.tolist()
            self._buffer = None
        return self._values


class Totals:
    """Norms over all ranks of what each has a part of: one collective for all of a backward.

    Every rank asks for the first of them at the same place of its program, as with any DTensor.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._expected: list[Norms] = []
        self._found: dict[int, list[tuple[float, float]]] = {}  # by the id of the norms

    def expect(self, norms: Iterable[Norms]) -> None:
        """These will be asked for, in the same order in every rank."""
        self._expected = list({id(each): each for each in norms}.values())

    def get(self, norms: Norms, k: int) -> tuple[float, float]:
        """The L2 norm and the largest absolute value of the k-th gradient."""
        if not self._found:
            self._gather()
        return self._found[id(norms)][k]

    def _gather(self) -> None:
        mine = [each.rows() for each in self._expected]
        flat = [value for rows in mine for row in (rows[0], rows[-1]) for value in row]
        of_ranks = self._ranks.gathered(flat)
        first = 0
        for each in self._expected:
            count = len(each.indices)
            squares = [sum(row[first + k] ** 2 for row in of_ranks) for k in range(count)]
            largest = [max(row[first + count + k] for row in of_ranks) for k in range(count)]
            self._found[id(each)] = list(zip(map(math.sqrt, squares), largest, strict=True))
            first += 2 * count
