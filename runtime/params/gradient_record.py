"""One gradient in one call of `backward()`: its record and its norms."""

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

    WRITE        into the bucket, whose memory autograd adopts as `p.grad` without a copy ACCUMULATE
    the bucket has a gradient already: the device adds to it and writes the total into the bucket.
                 `p.grad` is set to None, and autograd receives the total
    ACCUMULATE_SAME_PASS
                 the same, if the gradient so far is from an earlier graph in the same backward:
                 autograd has its memory already and receives nothing more
    SEPARATE     into separate memory, and autograd adds: an observer could see the difference
    DISCARD      dropped: autograd does not need it
    """

    WRITE = enum.auto()
    ACCUMULATE = enum.auto()
    ACCUMULATE_SAME_PASS = enum.auto()
    SEPARATE = enum.auto()
    DISCARD = enum.auto()

    @property
    def in_bucket(self) -> bool:
        """True if autograd receives the bucket's memory."""
        return self is GradRoute.WRITE or self is GradRoute.ACCUMULATE

    @property
    def adds(self) -> bool:
        """True if the device accumulates into the gradient so far."""
        return self is GradRoute.ACCUMULATE or self is GradRoute.ACCUMULATE_SAME_PASS


class Wish(enum.Enum):
    """Autograd's request for one gradient."""

    ACCUMULATE = enum.auto()
    SHOW = enum.auto()  # a hook sees it
    RETURN = enum.auto()  # requested by `autograd.grad()`: not accumulated
    NONE = enum.auto()


class Others(enum.Enum):
    """The other users of a parameter in the same backward."""

    NONE = enum.auto()
    GRAPHS = enum.auto()  # other captured graphs, or the same one twice
    CODE = enum.auto()  # uncaptured code, or unknown


class ParamUse(NamedTuple):
    """The use of one parameter in a backward."""

    wish: Wish = Wish.ACCUMULATE
    others: Others = Others.NONE


USUAL = ParamUse()


class GradientRecord:
    """The gradient of one parameter in one call of `backward()`; owned by its `BackwardPass`.

    The class attributes hold the values of the common case: a first gradient, from one captured
    graph. An object sets only those that differ, so that creating one calls nothing.
    """

    # route in the captured graph whose backward runs or ran last
    use = USUAL
    route = GradRoute.WRITE
    joined = False  # True if autograd adds to a `p.grad` outside of the bucket
    separate: torch.Tensor | None = None  # separate memory
    kept = False  # adopted by a resident bucket
    done = False  # done by an attempt that ran out of memory
    # used at the end of `backward()`
    memory: torch.Tensor | None = None  # received by autograd
    in_bucket = False  # True if that is the bucket's memory
    first = False  # True if `p.grad` was None before
    watched = False  # True if it is read before the end
    before: torch.Tensor | None = None  # the `p.grad` that the total replaces
    summed: bool | None = None  # False: by a later backward; None: not in the bucket
    updated = False  # consumed by an update in the backward
    norms: Norms | None = None  # of the consumed gradient

    @property
    def is_seen(self) -> bool:
        """True if the graph's gradient is read before `backward()` returns."""
        return self.joined or self.use.wish is Wish.SHOW or self.use.others is Others.CODE


class Norms:
    """The norms of a bucket's gradients, in flight to the host or on the device.

    Args:
        indices: the parameters' indices.
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
        """Copy the norms to the host on a stream."""
        make = torch.empty if queue is None else pinned_empty
        self._buffer = make(tuple(norms.shape), dtype=norms.dtype)
        self._buffer.copy_(norms, non_blocking=True)
        if queue is not None:
            self._copied = queue.record_event()

    def keep(
        self,
        norms: torch.Tensor,  # in the order that `fill` expects
        made: torch.cuda.Event | None,
    ) -> None:
        """Leave them on the device until requested; `made` is recorded after them."""
        self._buffer, self._copied = norms, made

    def get(self, k: int) -> tuple[float, ...]:
        """The L2 norm and, if computed, the largest absolute value of the k-th gradient."""
        return tuple([row[k] for row in self.rows()])

    def rows(self) -> list[list[float]]:
        """The L2 norms and, if computed, the largest absolute values."""
        if not self._values:
            assert self._buffer is not None, "norms that no op has taken"
            if self._copied is not None:
                self._copied.synchronize()
            self._values = self._buffer.tolist()
            self._buffer = None
        return self._values


class Totals:
    """Norms of sharded gradients over all ranks: one collective per backward.

    Every rank must request the first norm at the same point of its program, as with any DTensor.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._expected: list[Norms] = []
        self._found: dict[int, list[tuple[float, float]]] = {}  # by the id of the norms

    def expect(self, norms: Iterable[Norms]) -> None:
        """Register norms for the collective, in the same order in every rank."""
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
