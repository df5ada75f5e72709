"""Where the gradients of captured graphs go: into the host buckets, and from there to autograd.

The parameters are inputs of a captured graph's autograd node, and their gradients are its results.
For each parameter there is one of these ways (`Goes`):

    FIRST   into the bucket, whose memory autograd takes as `p.grad` without a copy
    TOTAL   the bucket has a gradient already: the device adds, and the total goes into the bucket.
            It was `p.grad`, which is taken away, and autograd gets the total in its place
    MORE    the same where the gradient so far is that of an earlier graph in this very backward:
            autograd has its memory already, and gets nothing more
    APART   into memory of its own, and autograd adds: somebody could tell the difference
    PROXY   the same on the device, for `autograd.grad()` of what the model's own forward holds
    NOBODY  nowhere: autograd does not ask for it
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from megacompile import compat
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.params.accumulators import Accumulator, Users
from megacompile.runtime.params.backward_pass import (
    BackwardPass,
    Norms,
    Place,
    lies_in_bucket,
    same_memory,
)
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.consumed import consumed
from megacompile.runtime.params.lazy import served


class Goes(enum.Enum):
    """Where one gradient goes."""

    FIRST = enum.auto()
    TOTAL = enum.auto()
    MORE = enum.auto()
    APART = enum.auto()
    PROXY = enum.auto()
    NOBODY = enum.auto()


_IN_BUCKET = (Goes.FIRST, Goes.TOTAL)
_ADDS = (Goes.TOTAL, Goes.MORE)


class Run:
    """The backward of one schedule: what becomes of each gradient.

    Args:
        places: the parameters that the captured graph trains.
        users: who uses parameters in the same backward; nothing: it is not known.
        proxies: those of them that `autograd.grad()` asks for by what the forward holds.
        observed: does somebody that cannot be seen look at gradients before `backward()` returns?
    """

    def __init__(
        self,
        gradients: Gradients,
        places: Iterable[Place],
        users: Sequence[Users],
        *,
        proxies: Collection[Place] = (),
        observed: bool = False,
    ) -> None:
        self._of = gradients
        self.backward = gradients.backward_pass()
        self.observed = observed
        self.proxies = frozenset(proxies)
        self.shared: set[Place] = set()  # others use them too
        self.several: set[Place] = set()  # several graphs do
        self.hooked: set[Place] = set()
        self.joined: set[Place] = set()  # autograd adds to a `p.grad` that is not in the bucket
        self.captured: set[Place] = set()  # autograd.grad() was called for them
        self.unwanted: set[Place] = set()
        for place in places:
            if not gradients.param(place).requires_grad:  # frozen since the forward
                self.unwanted.add(place)
                continue
            end = gradients.end(place)
            runs = end.runs
            if runs is None:
                self.captured.add(place)
            elif not runs:
                self.unwanted.add(place)
            elif end.hooked:
                self.hooked.add(place)
            key = id(end.param)
            if not users or any(key in each.others for each in users):
                self.shared.add(place)
            elif any(key in each.several for each in users):
                self.several.add(place)
        self.goes: dict[Place, Goes] = {}
        self.apart: dict[Place, torch.Tensor] = {}
        self._sent: set[int] = set()  # buckets that are on their way
        self._done: set[Place] = set()  # by an attempt that ran out of memory

    @property
    def exceptions(self) -> set[Place]:
        """The parameters whose gradients cannot stay on the device."""
        return self.hooked | self.captured | self.unwanted

    def start(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """Prepare memory for gradients; True if there are some already to add to on the device.

        Called in a backward, before its schedule runs.
        """
        places = [(key, i) for key, params in wanted.items() for i in params]
        self._of.prepare(wanted, self)
        for place in places:
            if place not in self._done:
                self.goes[place] = self._way(place)
        more = {place[0] for place in places if self.goes[place] is Goes.MORE}
        self.backward.await_copies(more & self.backward.copies.keys())  # before they are fetched
        return any(self.goes[place] in _ADDS for place in places)

    def start_update(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """The same where the backward updates: it takes the gradients that there are, and keeps
        none on the host."""
        self.backward.updated |= {(key, i) for key, params in wanted.items() for i in params}
        have = {
            key: params
            for key, params in wanted.items()
            if any(not _is_gone(self._of.param((key, i)).grad) for i in params)
        }
        self._of.prepare(have, self)
        for key, params in have.items():
            for i in params:
                if self._of.bring_in((key, i)):
                    self.goes[key, i] = Goes.TOTAL
        return bool(self.goes)

    def _way(self, place: Place) -> Goes:
        if place in self.proxies:
            return Goes.PROXY
        if place in self.unwanted:
            return Goes.NOBODY
        if place in self.backward.handed and place not in self.shared:
            return Goes.MORE
        if place in self.captured or place in self.backward.handed:
            return Goes.APART
        if self._of.is_busy(place):  # in another backward(), of another thread
            return Goes.APART
        gradient = self._of.param(place).grad
        if _is_gone(gradient) or gradient is None:
            return Goes.FIRST
        if gradient.layout is not torch.strided or not self._of.is_ours(place):
            self.joined.add(place)
            return Goes.FIRST if self._of.is_free(place) else Goes.APART
        alone = place not in self.shared and not self._of.end(place).hooked_before
        if self._of.exact and place in self.several:  # autograd adds their sum to `p.grad`
            alone = False
        return Goes.TOTAL if alone else Goes.APART

    def repeat(self) -> None:
        """The schedule starts again: what it has sent to the host is not sent twice."""
        self._done |= {place for place in self.goes if place[0] in self._sent}

    # For the ops of the schedule.

    def so_far(self, key: int, index: int) -> torch.Tensor | None:
        """The host gradient to add to; None where there is none."""
        return self.buffer(key, index) if self.goes.get((key, index)) in _ADDS else None

    def drops(self, key: int, index: int) -> bool:
        """Does a gradient go nowhere, or is it there already?"""
        return (key, index) in self._done or self.goes[key, index] is Goes.NOBODY

    def drops_any(self, key: int, indices: Iterable[int]) -> bool:
        """Are there such ones among these?"""
        return any(self.drops(key, i) for i in indices)

    def drops_all(self, key: int, indices: Iterable[int]) -> bool:
        """Are all of these such ones?"""
        return all(self.drops(key, i) for i in indices)

    def is_final(self, key: int, index: int) -> bool:
        """Will `p.grad` be what this schedule computes, as far as can be known?"""
        place = key, index
        return self.goes[place] in _IN_BUCKET and not self.watches(place)

    def watches(self, place: Place) -> bool:
        """Does somebody look at a gradient before `backward()` returns?"""
        looks = place in self.hooked or place in self.shared or place in self.joined
        return self.observed or looks

    def buffer(self, key: int, index: int) -> torch.Tensor:
        """Where a gradient goes."""
        place = key, index
        bucket, goes = self._of.buckets[key], self.goes[place]
        if goes in _IN_BUCKET:
            return bucket.grads[index]
        if goes is Goes.MORE:
            return self.backward.handed[place]
        if place not in self.apart:
            device = self._of.streams.device if goes is Goes.PROXY else None
            like = bucket.values[index]
            self.apart[place] = torch.empty_like(like, dtype=bucket.grad_dtype, device=device)
        return self.apart[place]

    def norms_buffer(self, key: int, indices: Sequence[int]) -> torch.Tensor:
        """Where the norms of these gradients go: (2, len(indices)) float32, L2 and largest."""
        pin = self._of.streams.device.type == "cuda"
        buffer = torch.empty(2, len(indices), dtype=torch.float32, pin_memory=pin)
        self.backward.norms[key] = Norms(tuple(indices), buffer)
        return buffer

    def norms_copied(self, key: int, queue: torch.cuda.Stream | None) -> None:
        """The norms of a bucket are on their way to their buffer."""
        if queue is not None:
            self.backward.norms[key].copied = queue.record_event()

    def copied(self, key: int, event: torch.cuda.Event | None) -> None:
        """The gradients of a bucket are on their way to the host; `event` is behind them."""
        self.backward.copies[key] = event
        self._sent.add(key)

    # For autograd.

    def device_update(self) -> tuple[dict[Place, torch.Tensor], dict[Place, torch.Tensor]]:
        """What autograd gets, now that the schedule has been issued: for parameters, for proxies.

        A tensor among it is held by nobody else, so that autograd may take it as it is.
        """
        if self._of.several_passes or any(self._is_read(*item) for item in self.goes.items()):
            self.backward.await_copies(self.backward.copies)
            self._of.streams.synchronize(Stream.D2H)
        of_params = {}
        for place, goes in self.goes.items():
            if place in self.backward.updated:
                continue
            if goes in _IN_BUCKET:
                self._take_place(place, goes)
                of_params[place] = self.buffer(*place).detach()
            elif goes is Goes.APART:
                memory = self.buffer(*place)
                del self.apart[place]
                if place not in self.shared:
                    self.backward.handed[place] = memory
                of_params[place] = memory.detach()
        of_proxies, self.apart = self.apart, {}
        return of_params, of_proxies

    def _is_read(self, place: Place, goes: Goes) -> bool:
        """Does autograd, or somebody else, read it at once?"""
        if self.watches(place):
            return True
        if goes is Goes.MORE:  # added to what an earlier graph handed over, which may be read
            added = not _is_gone(self._of.param(place).grad)  # by another thread, meanwhile
            return added or place not in self.backward.taken or place in self.backward.watched
        return goes not in _IN_BUCKET

    def _take_place(self, place: Place, goes: Goes) -> None:
        backward, param = self.backward, self._of.param(place)
        backward.handed[place] = self.buffer(*place)
        backward.taken.add(place)
        if self.watches(place):
            backward.watched.add(place)
        if _is_gone(param.grad):
            param.grad = None
            backward.fresh.add(place)
        elif goes is Goes.TOTAL:
            assert param.grad is not None
            backward.replaced[place] = param.grad
            param.grad = None


class Gradients:
    """The gradients of a model's parameters, by bucket and position.

    Args:
        streams: that copies to the host are made on.
        exact: add in autograd's order, bit by bit, even where that takes more memory.
    """

    def __init__(self, streams: Streams, *, exact: bool = True) -> None:
        self.streams = streams
        self.exact = exact
        self.buckets: dict[int, HostBucket] = {}
        self.run: Run | None = None  # of the schedule that runs now
        self._places: dict[int, Place] = {}  # id(parameter) -> place
        self._ends: dict[Place, Accumulator] = {}
        self._passes: dict[int, BackwardPass] = {}  # those that run, by autograd's number

    def bind(self, buckets: Mapping[int, HostBucket]) -> None:
        """Use these buckets from now on."""
        self.buckets = dict(buckets)
        self._ends.clear()  # a parameter that has moved to another device has another
        self._places = {
            id(param): (key, i)
            for key, bucket in self.buckets.items()
            for i, param in enumerate(bucket.params)
        }

    def running(self) -> Run:
        """What becomes of the gradients of the schedule that runs now."""
        assert self.run is not None, "outside of a backward"
        return self.run

    def place(self, param: torch.Tensor) -> Place | None:
        """A parameter's bucket and index; None for one that is not ours."""
        return self._places.get(id(param))

    def param(self, place: Place) -> nn.Parameter:
        """The parameter of a place."""
        return self.buckets[place[0]].params[place[1]]

    def end(self, place: Place) -> Accumulator:
        """The AccumulateGrad node of a parameter."""
        if place not in self._ends:
            self._ends[place] = Accumulator(self.param(place))
        return self._ends[place]

    def backward_pass(self) -> BackwardPass:
        """The call of `backward()` that runs in this thread."""
        number = compat.backward_id()
        if number not in self._passes:
            found = self._passes[number] = BackwardPass(self.streams, self.buckets)

            def finish() -> None:
                del self._passes[number]
                found.finish()

            # a call that fails drops `finish` without calling it
            dropped = weakref.finalize(finish, _give_up, self._passes, number, found)
            dropped.atexit = False
            compat.when_backward_ends(finish)
        return self._passes[number]

    @property
    def several_passes(self) -> bool:
        """Do several calls of `backward()` run, in threads? Each may accumulate first."""
        return len(self._passes) > 1

    def is_ours(self, place: Place) -> bool:
        """Does `p.grad` lie in its place in the bucket?"""
        return lies_in_bucket(self.buckets[place[0]], place[1])

    def is_free(self, place: Place) -> bool:
        """Has nobody but the bucket the memory of a gradient?"""
        return compat.storage_users(self.buckets[place[0]].grads[place[1]]) == 1

    def is_busy(self, place: Place) -> bool:
        """Has a call of `backward()` handed over a gradient, and not ended?"""
        passes = tuple(self._passes.values())  # a thread may begin or end one meanwhile
        return any(place in backward.handed for backward in passes)

    def prepare(self, wanted: Mapping[int, Sequence[int]], run: Run) -> None:
        """Get memory for these gradients, whose `p.grad` are plain tensors from now on."""
        for key, params in wanted.items():
            bucket = self.buckets[key]
            bucket.pending.settle()
            bucket.pending.withdraw()
            if any((key, i) not in run.unwanted for i in params):
                run.backward.norms.pop(key, None)
            for i in params:
                _open(bucket.params[i].grad)
            if not bucket.grads.keys() >= set(params) or self._held_by_user(key, bucket):
                self._renew(key, bucket)
        self._part([(key, i) for key, params in wanted.items() for i in params])

    def bring_in(self, place: Place) -> bool:
        """Copy a gradient of the user's into its place in the bucket; False if there is none."""
        gradient = self.param(place).grad
        if _is_gone(gradient) or gradient is None:
            return False
        if not self.is_ours(place):
            with torch.no_grad():
                self.buckets[place[0]].grads[place[1]].copy_(gradient.to_dense())
        return True

    def _part(self, places: Iterable[Place]) -> None:
        """Give a `p.grad` that lies in the place of another one's memory of its own."""
        there = [(place, self.param(place).grad) for place in places]
        there = [(place, gradient) for place, gradient in there if not _is_gone(gradient)]
        if not there:  # as behind zero_grad()
            return
        buffers = {
            g.data_ptr(): (k, i) for k, b in self.buckets.items() for i, g in b.grads.items()
        }
        for place, gradient in there:
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if gradient.numel() and buffers.get(gradient.data_ptr(), place) != place:
                gradient.data = gradient.detach().clone()

    def take(self, key: int) -> dict[int, torch.Tensor]:
        """Take a bucket's gradients out of `p.grad`: by the parameter's index."""
        bucket = self.buckets[key]
        taken = {}
        for i, param in enumerate(bucket.params):
            gradient = param.grad
            if gradient is None or consumed(gradient):
                continue
            _open(gradient)
            taken[i] = gradient.detach()
            param.grad = None
        return taken

    @staticmethod
    def put(bucket: HostBucket, taken: Mapping[int, torch.Tensor]) -> None:
        """Put them into a bucket that lies elsewhere."""
        if taken:
            bucket.make_grads()
        for i, gradient in taken.items():
            if i in bucket.grads:
                bucket.params[i].grad = bucket.grads[i].copy_(gradient).detach()
            else:  # frozen since
                bucket.params[i].grad = gradient.to(bucket.values[i].device)

    def _held_by_user(self, key: int, bucket: HostBucket) -> bool:
        """Does somebody still hold a gradient that `zero_grad()` took out of `p.grad`?"""
        return any(
            _is_gone(param.grad)
            and i in bucket.grads
            and not self.is_busy((key, i))
            and not self.is_free((key, i))
            for i, param in enumerate(bucket.params)
        )

    def _renew(self, key: int, bucket: HostBucket) -> None:
        """New memory for a bucket's gradients; what is in use moves along."""
        old = bucket.grads
        bucket.make_grads()
        for i, before in old.items():
            gradient = bucket.params[i].grad
            ours = not _is_gone(gradient) and gradient is not None and same_memory(gradient, before)
            if not ours and not self.is_busy((key, i)):
                continue
            if i not in bucket.grads or not ours:  # it was frozen since, or autograd has it
                bucket.grads[i] = before
                continue
            self.streams.synchronize(Stream.D2H)
            bucket.grads[i].copy_(before)
            assert gradient is not None
            gradient.data = bucket.grads[i]  # p.grad stays the tensor that it is


def _open(gradient: torch.Tensor | None) -> None:
    """Make a lazy gradient a plain one: it is about to change."""
    who = served(gradient)
    if gradient is not None and who is not None:
        who.open(gradient)


def _give_up(passes: dict[int, BackwardPass], number: int, found: BackwardPass) -> None:
    """A backward has ended; if `finish` was not called, it has failed."""
    if passes.get(number) is found:
        del passes[number]
        found.give_up()


def _is_gone(gradient: torch.Tensor | None) -> bool:
    """Is there nothing to accumulate into?"""
    return gradient is None or consumed(gradient)
