"""One call of `backward()`: a record of each gradient that captured graphs return to autograd, and
the work at its end.

Autograd adopts a bucket's gradient as `p.grad` without a copy, adds to an existing one, and runs
hooks. The end of `backward()` waits for copies to the host and gives each `p.grad` its precomputed
norm. Sums that autograd allocated elsewhere are copied into the bucket.
"""

from __future__ import annotations

import enum
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from megacompile import compat
from megacompile.host_memory import pinned_empty
from megacompile.ir.buckets import ParamId
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.params.gradient_guards import (
    GradientGuard,
    is_unsummed,
    leave_unsummed,
    take,
)
from megacompile.runtime.params.guards import GuardState, guard_of, release
from megacompile.runtime.params.host_bucket import HostBucket


class GradRoute(enum.Enum):
    """The route of one gradient of a captured graph."""

    WRITE = enum.auto()  # into the bucket, whose memory autograd adopts as `p.grad` without a copy
    # the device adds to the bucket's gradient and writes the total there. `p.grad` is set to None,
    # and autograd receives the total
    ACCUMULATE = enum.auto()
    # the same, if an earlier graph of this backward returned the gradient so far: autograd has that
    # memory already and receives nothing more
    ACCUMULATE_SAME_PASS = enum.auto()
    SEPARATE = enum.auto()  # into separate memory, for autograd to add or return
    DISCARD = enum.auto()  # autograd does not need it

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
    graph. An object sets only those that differ, so that creating one runs no Python code.
    """

    # route in the captured graph whose backward runs or ran last
    use = USUAL
    route = GradRoute.WRITE
    joined = False  # True if autograd adds to a `p.grad` outside of the bucket
    separate: torch.Tensor | None = None  # separate memory
    kept = False  # adopted by a resident bucket
    done = False  # delivered before an attempt ran out of memory
    # used at the end of `backward()`
    memory: torch.Tensor | None = None  # received by autograd
    in_bucket = False  # True if that is the bucket's memory
    first = False  # True if `p.grad` was None before
    watched = False  # True if it is read before the end
    before: torch.Tensor | None = None  # the `p.grad` that the total replaces
    summed: bool | None = None  # over replicas; False: not yet; None: not in the bucket
    updated = False  # consumed by an update in the backward
    norms: Norms | None = None  # of the consumed gradient

    @property
    def is_seen(self) -> bool:
        """True if the graph's gradient is read before `backward()` returns."""
        return self.joined or self.use.wish is Wish.SHOW or self.use.others is Others.CODE


class Norms:
    """The norms of a bucket's gradients, in flight to the host or on the device."""

    def __init__(self, indices: Iterable[int]) -> None:
        self.indices = tuple(indices)
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
        buffer = make(tuple(norms.shape), dtype=norms.dtype)
        buffer.copy_(norms, non_blocking=True)
        self.keep(buffer, None if queue is None else queue.record_event())

    def keep(self, norms: torch.Tensor, made: torch.cuda.Event | None) -> None:
        """Keep norms on the device, shaped as for `fill`; the event `made` follows them."""
        self._buffer, self._copied = norms, made

    def rows(self) -> list[list[float]]:
        """The L2 norms and, if computed, the largest absolute values."""
        if not self._values:
            assert self._buffer is not None, "norms that no op has taken"
            if self._copied is not None:
                self._copied.synchronize()
            self._values = self._buffer.tolist()
            self._buffer = None
        return self._values


Rows = Callable[[Norms], list[list[float]]]  # of one rank, or over all ranks


def over_ranks(ranks: Ranks, expected: Iterable[Norms]) -> Rows:
    """Norms of sharded gradients over all ranks: one collective per backward. Every rank expects
    norms in the same order, and must request the first one at the same point of its program, as
    with any DTensor."""
    norms = list({id(each): each for each in expected}.values())
    found: dict[int, list[list[float]]] = {}  # by the id of the norms

    def rows(wanted: Norms) -> list[list[float]]:
        if not found:
            mine = [each.rows() for each in norms]
            flat = [value for rows in mine for row in (rows[0], rows[-1]) for value in row]
            columns = list(zip(*ranks.gathered(flat), strict=True))  # each: a value per rank
            first = 0
            for each in norms:
                middle = first + len(each.indices)
                end = middle + len(each.indices)
                squares = [sum(x**2 for x in column) for column in columns[first:middle]]
                found[id(each)] = [[*map(math.sqrt, squares)], [*map(max, columns[middle:end])]]
                first = end
        return found[id(wanted)]

    return rows


@dataclass(eq=False)
class BackwardPass:
    """The gradients of one call of `backward()`; `Gradients` keeps it until the call ends."""

    streams: Streams
    buckets: Mapping[int, HostBucket]
    ranks: Ranks | None
    records: defaultdict[ParamId, GradientRecord] = field(
        default_factory=partial(defaultdict, GradientRecord)
    )
    norms: dict[int, Norms] = field(default_factory=dict)  # by bucket
    # by bucket: copies to the host
    copies: dict[int, torch.cuda.Event | None] = field(default_factory=dict)

    def await_copies(self, keys: Iterable[int]) -> None:
        """Wait on the host for the copies of some buckets' gradients."""
        for key in keys:
            event = self.copies[key]
            if event is None:
                continue
            if self.buckets[key].resident is None:
                event.synchronize()
            else:  # readers run on the compute stream
                torch.cuda.current_stream(self.streams.device).wait_event(event)

    def give_up(self) -> None:
        """After a failure, restore gradients taken out of `p.grad` and not accumulated."""
        self.await_copies(self.copies)
        for (key, i), record in self.records.items():
            param = self.buckets[key].params[i]
            if record.before is not None and param.grad is None:
                param.grad = record.before
        self._leave_unsummed()

    def finish(self) -> None:
        """Finish `backward()`: every `p.grad` becomes usable by any code.

        Waits for the copies to the host, except for buckets that the device will update: their
        gradients are guarded, and the first reader waits.
        """
        records, taken, updated, settled = self.records, list[ParamId](), list[ParamId](), True
        norms = list(self.norms.values())
        for place, record in records.items():
            if record.in_bucket:
                taken.append(place)
                settled = settled and record.before is None
            if record.updated:
                updated.append(place)
                norms += filter(None, [record.norms])
        in_place = self._in_place(taken)
        lazy = self._lazy(in_place) if self.norms else set[int]()
        if taken or not updated:
            self.await_copies(self.copies.keys() - lazy)
        # guards hold norms, not gradients: the next gradients reuse that memory
        rows: Rows = Norms.rows
        if self.ranks is not None:
            rows = over_ranks(self.ranks, norms)
        for key, i in updated:
            bucket, norms_of, of_it = self.buckets[key], records[key, i].norms, None
            if norms_of is not None:
                of_it = partial(_of_one, rows, norms_of, norms_of.indices.index(i))
            take(bucket.params[i], bucket.layout.params[i].name, of_it)
        if not settled or len(in_place) < len(taken):
            for place in sorted(taken):
                self._settle_down(place)
            in_place = self._in_place(taken)
        if self.ranks is not None and self.ranks.replicas > 1:
            for (key, i), record in records.items():
                gradient = self.buckets[key].params[i].grad
                if record.summed and gradient is not None and is_unsummed(gradient):
                    release(gradient)
            self._leave_unsummed()
        for key, norms_of in self.norms.items():
            for k, i in enumerate(norms_of.indices):
                if (key, i) in in_place and not records[key, i].watched:
                    self._serve(key, i, partial(_of_one, rows, norms_of, k), lazy=key in lazy)
        records.clear()

    def _leave_unsummed(self) -> None:
        for (key, i), record in self.records.items():
            if record.summed is False:
                leave_unsummed(self.buckets[key].params[i], self.buckets[key].layout.params[i].name)

    def _in_place(self, taken: Sequence[ParamId]) -> set[ParamId]:
        """Those of the gradients that are in place in the buckets. Usually all are, so one check of
        all comes first."""
        buckets, address = self.buckets, torch.Tensor.data_ptr
        theirs, ours = list[Any](), list[Any]()
        for key, i in taken:
            theirs.append(buckets[key].params[i].grad)
            ours.append(buckets[key].grads.get(i))
        if (
            {torch.Tensor}.issuperset(map(type, chain(theirs, ours)))
            and {torch.strided}.issuperset(map(attrgetter("layout"), theirs))
            and all(map(operator.eq, map(address, theirs), map(address, ours)))
        ):
            return set(taken)
        return {(key, i) for key, i in taken if is_in_bucket(buckets[key], i)}

    def _settle_down(self, place: ParamId) -> None:
        """Restore the tensor of `p.grad`, or adopt a sum that autograd allocated."""
        key, i = place
        bucket, record = self.buckets[key], self.records[place]
        param, before = bucket.params[i], record.before
        gradient, memory = param.grad, bucket.grads.get(i)
        if gradient is None or memory is None:  # a hook removed it, or the parameter is now frozen
            return
        mine = compat.local(gradient)
        if is_in_bucket(bucket, i):
            if before is not None:
                param.grad = before
        elif (
            record.first
            and type(mine) is torch.Tensor
            and mine.dtype == memory.dtype
            and gradient.layout is torch.strided
            and compat.storage_users(mine) == compat.storage_users(memory) == 1
        ):
            with torch.no_grad():
                memory.copy_(mine)
            param.grad = compat.like(param, memory.detach())

    def _lazy(self, in_place: set[ParamId]) -> set[int]:
        """The buckets whose gradients may still be in flight when `backward()` returns: autograd
        adopted each unchanged and nothing read it."""
        return {
            key
            for key, norms in self.norms.items()
            if key in self.copies
            and self.buckets[key].pending.offered is not None
            and all(
                (key, i) in in_place
                and not self.records[key, i].watched
                and self.records[key, i].before is None
                for i in norms.indices
            )
        }

    def _serve(self, key: int, i: int, norms: Callable[[], Sequence[float]], *, lazy: bool) -> None:
        """Guard a gradient with norms from the device; the guard returns these norms."""
        bucket = self.buckets[key]
        gradient = bucket.params[i].grad
        mine = None if gradient is None else compat.local(gradient)
        if gradient is None or type(mine) is not torch.Tensor or guard_of(gradient) is not None:
            return
        if lazy or compat.storage_users(mine) <= 2:  # no alias changes it
            name, copied = bucket.layout.params[i].name, self.copies[key] if lazy else None
            state, work = GuardState.LAZY, bucket.pending
            GradientGuard(gradient, state, name, norms, work=work, copied=copied)


def _of_one(rows: Rows, norms: Norms, k: int) -> tuple[float, ...]:
    """The L2 norm and, if computed, the largest absolute value of the k-th gradient."""
    return tuple([row[k] for row in rows(norms)])


def is_in_bucket(bucket: HostBucket, index: int) -> bool:
    gradient, memory = bucket.params[index].grad, bucket.grads.get(index)
    return gradient is not None and memory is not None and same_memory(gradient, memory)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors of one shape have the same address; empty tensors have none."""
    a = compat.local(a)
    return a.layout is torch.strided and (a.data_ptr() == b.data_ptr() or not a.numel())
