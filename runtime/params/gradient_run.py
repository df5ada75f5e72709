"""The routes of the gradients of captured graphs: into the buckets, and from there to autograd.

The parameters are inputs of gates, autograd nodes behind a captured graph's own, which hand each of
them its gradient. A `GradientRun` has a record of each parameter that its schedule has a gradient
of; what it leaves for the end of `backward()` is in the records of the `BackwardPass`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from megacompile import compat
from megacompile.ir.buckets import ParamId
from megacompile.ir.stream import Stream
from megacompile.runtime.params.accumulators import Users
from megacompile.runtime.params.backward_pass import GradientRecord, Norms
from megacompile.runtime.params.gradients import Gradients, is_gone


class GradRoute(enum.Enum):
    """The route of one gradient.

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


class RunRecord(NamedTuple):
    """One parameter in the backward of one schedule."""

    wish: Wish = Wish.ACCUMULATE
    others: Others = Others.NONE
    route: GradRoute = GradRoute.WRITE
    joined: bool = False  # autograd adds to a `p.grad` that is not in the bucket

    @property
    def is_seen(self) -> bool:
        """True if the gradient is read before `backward()` returns."""
        return self.joined or self.wish is Wish.SHOW or self.others is Others.CODE


_USUAL = RunRecord()
_IN_BUCKET = (GradRoute.WRITE, GradRoute.ACCUMULATE)
_ADDS = (GradRoute.ACCUMULATE, GradRoute.ACCUMULATE_SAME_PASS)
_OURS = (*_IN_BUCKET, GradRoute.ACCUMULATE_SAME_PASS)


def _unusual(
    gradients: Gradients, places: tuple[ParamId, ...], users: Sequence[Users]
) -> dict[ParamId, RunRecord]:
    """The parameters that have other users, or whose gradients are not just accumulated; without
    routes. Arguments: see `GradientRun`."""
    found: dict[ParamId, RunRecord] = {}
    others = frozenset().union(*[each.others for each in users])
    several = frozenset().union(*[each.several for each in users])
    ends = gradients.ends(places)
    alone = others.isdisjoint(ends.ids) and several.isdisjoint(ends.ids)
    if users and alone and not ends.hooked and ends.all_run:
        return found
    for place in places:
        param = gradients.param(place)
        if not param.requires_grad:  # frozen since the forward
            found[place] = RunRecord(Wish.NONE)
            continue
        end = gradients.end(place)
        runs = end.runs
        if runs is None:
            wish = Wish.RETURN
        elif not runs:
            wish = Wish.NONE
        else:
            wish = Wish.SHOW if end.hooked else Wish.ACCUMULATE
        by = Others.GRAPHS if id(param) in several else Others.NONE
        if not users or id(param) in others:
            by = Others.CODE
        record = RunRecord(wish, by)
        if record != _USUAL:
            found[place] = record
    return found


class GradientRun:
    """The backward of one schedule: what becomes of each gradient.

    Args:
        places: the parameters that the captured graph trains.
        users: who uses parameters in the same backward; nothing: it is not known.
        observed: does unseen code read gradients before `backward()` returns?
    """

    def __init__(
        self,
        gradients: Gradients,
        places: Iterable[ParamId],
        users: Sequence[Users],
        *,
        observed: bool = False,
    ) -> None:
        self._of = gradients
        self.backward = gradients.backward_pass()
        self.observed = observed
        self.unusual = _unusual(gradients, tuple(places), users)
        self.records: dict[ParamId, RunRecord] = {}  # of those that the schedule has gradients of
        self._separate: dict[ParamId, torch.Tensor] = {}  # their own memory
        self._sent: set[int] = set()  # buckets that are on their way
        self._kept: set[ParamId] = set()  # by buckets that live on the device
        self._done: set[ParamId] = set()  # by an attempt that ran out of memory
        self.all_first = False  # are all routes WRITE, and is none read before the end?

    def asked(self) -> set[ParamId]:
        """The parameters whose gradients cannot stay on the device."""
        return {at for at, each in self.unusual.items() if each.wish is not Wish.ACCUMULATE}

    def used_by(self, others: Others) -> set[ParamId]:
        """The parameters that have such other users."""
        return {at for at, each in self.unusual.items() if each.others is others}

    def start(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """Prepare memory for gradients; True if there are some already to add to on the device.

        Called in a backward, before its schedule runs.
        """
        places = [(key, i) for key, params in wanted.items() for i in params]
        self.all_first = self._are_first(places)
        self._prepare(wanted, fresh=self.all_first)
        if self.all_first:
            self.records = dict.fromkeys(places, _USUAL)
            return False
        for place in places:
            if place not in self._done:
                self.records[place] = self._routed(place)
        added, more, adds = [], set(), False
        for place in places:
            route = self.records[place].route
            adds = adds or route in _ADDS
            if route is GradRoute.ACCUMULATE_SAME_PASS:
                more.add(place[0])
            elif route is GradRoute.SEPARATE and self.records[place].wish is not Wish.RETURN:
                added.append(place)
        self._of.sum_late(added)
        self.backward.await_copies(more & self.backward.copies.keys())  # before they are fetched
        return adds

    def _prepare(self, wanted: Mapping[int, Sequence[int]], *, fresh: bool = False) -> None:
        unwanted = {at for at, each in self.unusual.items() if each.wish is Wish.NONE}
        self._of.prepare(wanted, unwanted, self.backward, fresh=fresh)

    def _are_first(self, places: Sequence[ParamId]) -> bool:
        """Is there no gradient yet, and no other code that has a part in one, or reads one? The
        quick look, for every parameter in every step. Other graphs may have a part: they come
        later."""
        if self.observed or self._done or self._of.several_passes:
            return False
        usual = (Wish.ACCUMULATE, Others.GRAPHS)
        if any([(each.wish, each.others) != usual for each in self.unusual.values()]):
            return False
        if not self.backward.records.keys().isdisjoint(places):
            return False
        return self._of.ends(tuple(places)).without_gradients

    def may_defer(self) -> bool:
        """May the sum over replicas wait for a later backward? Not where other code has a part
        in a gradient: it may be read before that."""
        if self._of.exact and self.used_by(Others.GRAPHS):
            return False
        records = self.records.values()
        return not self.observed and all(r.route in _OURS and not r.is_seen for r in records)

    def note_sums(self, *, defers: bool) -> None:
        """The schedule sums over replicas; or, where it defers, it does not."""
        if self._of.ranks is None or self._of.ranks.replicas == 1:
            return
        for place, record in self.records.items():
            if record.route in _OURS:
                self.backward.record(place).summed = not defers

    def start_update(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """The same where the backward updates: it takes the gradients that there are, and keeps
        none on the host."""
        for key, params in wanted.items():
            for i in params:
                record = self.backward.record((key, i))
                record.updated, record.norms = True, None
        have = {
            key: params
            for key, params in wanted.items()
            if any(not is_gone(self._of.param((key, i)).grad) for i in params)
        }
        self._prepare(have)
        for key, params in have.items():
            for i in params:
                if self._of.bring_in((key, i)):
                    before = self.unusual.get((key, i), _USUAL)
                    self.records[key, i] = before._replace(route=GradRoute.ACCUMULATE)
        return bool(self.records)

    def _routed(self, place: ParamId) -> RunRecord:
        """The record of a parameter, with its route."""
        record, joined = self.unusual.get(place, _USUAL), False
        by_code, autograd_has = record.others is Others.CODE, self.backward.has(place)
        gradient = self._of.param(place).grad
        if record.wish is Wish.NONE:
            route = GradRoute.DISCARD
        elif autograd_has and not by_code:
            route = GradRoute.ACCUMULATE_SAME_PASS
        elif record.wish is Wish.RETURN or autograd_has or self._of.is_busy(place):
            route = GradRoute.SEPARATE  # busy: in another backward(), of another thread
        elif is_gone(gradient) or gradient is None:
            route = GradRoute.WRITE
        elif gradient.layout is not torch.strided or not self._of.is_ours(place):
            joined = True
            route = GradRoute.WRITE if self._of.is_free(place) else GradRoute.SEPARATE
        elif by_code or self._of.end(place).hooked_before:
            route = GradRoute.SEPARATE
        elif self._of.exact and record.others is Others.GRAPHS:
            route = GradRoute.SEPARATE  # autograd adds their sum to `p.grad`
        else:
            route = GradRoute.ACCUMULATE
        return record._replace(route=route, joined=joined)

    def repeat(self) -> None:
        """The schedule starts again: what it has sent to the host is not sent twice."""
        self._done |= {place for place in self.records if place[0] in self._sent}
        for key, i in self._kept:
            if self.records[key, i].route is GradRoute.WRITE:  # its memory is wanted
                self._of.buckets[key].grads.pop(i, None)
            else:
                self._done.add((key, i))
        self._kept.clear()

    # For the ops of the schedule.

    def so_far(self, key: int, index: int) -> torch.Tensor | None:
        """The host gradient to add to; None where there is none."""
        record = self.records.get((key, index))
        return None if record is None or record.route not in _ADDS else self.buffer(key, index)

    def dropped(self, key: int, indices: Iterable[int]) -> set[int]:
        """The gradients of a bucket, of these, that go nowhere or are there already."""
        if self.all_first:
            return set()
        gone, records = GradRoute.DISCARD, self.records
        return {i for i in indices if (key, i) in self._done or records[key, i].route is gone}

    def is_final(self, key: int, index: int) -> bool:
        """True if `p.grad` will be what this schedule computes, as far as can be known."""
        record = self.records[key, index]
        return record.route in _IN_BUCKET and not self.observed and not record.is_seen

    def buffer(self, key: int, index: int) -> torch.Tensor:
        """The memory that a gradient goes to."""
        place = key, index
        bucket, route = self._of.buckets[key], self.records[place].route
        if route in _IN_BUCKET:
            return bucket.grads[index]
        if route is GradRoute.ACCUMULATE_SAME_PASS:
            memory = self.backward.records[place].memory
            assert memory is not None
            return memory
        if place not in self._separate:
            like = bucket.values[index]
            self._separate[place] = torch.empty_like(like, dtype=bucket.grad_dtype)
        return self._separate[place]

    def keep(self, key: int, gradients: Mapping[int, torch.Tensor]) -> None:
        """Gives a bucket that lives on the device its gradients, by index."""
        bucket = self._of.buckets[key]
        if self.all_first:
            bucket.keep_grads(gradients)
            self._kept.update([(key, i) for i in gradients])
            return
        dropped = self.dropped(key, gradients)
        for i, gradient in gradients.items():
            if i in dropped:
                continue
            if self.records[key, i].route is GradRoute.WRITE:
                bucket.keep_grads({i: gradient})
            else:
                self.buffer(key, i).copy_(gradient)
            self._kept.add((key, i))

    def norms(self, key: int, indices: Sequence[int]) -> Norms:
        """The place of the norms of these gradients."""
        found = self.backward.norms[key] = Norms(tuple(indices))
        return found

    def update_norms(self, key: int, indices: Sequence[int]) -> Norms:
        """The same, of gradients that an update in this backward takes."""
        found = Norms(tuple(indices))
        for i in indices:
            record = self.backward.record((key, i))
            record.updated, record.norms = True, found
        return found

    def copied(self, key: int, event: torch.cuda.Event | None) -> None:
        """The gradients of a bucket are on their way to the host; `event` is after them."""
        self.backward.copies[key] = event
        self._sent.add(key)

    # For autograd.

    def for_autograd(self) -> dict[ParamId, torch.Tensor]:
        """The gradients for autograd, now that the schedule has been issued.

        A tensor among it has no other reference, so that autograd may take it as it is.
        """
        if self._are_still_first():
            return self._first_for_autograd()
        if self._of.several_passes or any(self._is_read(*item) for item in self.records.items()):
            self.backward.await_copies(self.backward.copies)
            self._of.streams.synchronize(Stream.D2H)
        found = {}
        for place, record in self.records.items():
            of_pass = self.backward.record(place)
            if of_pass.updated:
                continue
            if record.route in _IN_BUCKET:
                self._take_place(place, record, of_pass)
                found[place] = self._as_gradient(place, self.buffer(*place).detach())
            elif record.route is GradRoute.SEPARATE:
                memory = self.buffer(*place)
                del self._separate[place]
                if record.others is not Others.CODE:
                    of_pass.memory = memory
                found[place] = self._as_gradient(place, memory.detach())
        return found

    def _are_still_first(self) -> bool:
        """True if no `p.grad` was made meanwhile, as another thread may."""
        if not self.all_first or self._of.several_passes:
            return False
        return self._of.ends(tuple(self.records)).without_gradients

    def _first_for_autograd(self) -> dict[ParamId, torch.Tensor]:
        """The same where all of them are the first ones, and none is read."""
        buckets, of_pass, found = self._of.buckets, self.backward.records, {}
        for place in self.records:
            record = of_pass[place] = GradientRecord()  # no call of Python: there are many
            record.memory = memory = buckets[place[0]].grads[place[1]]
            record.in_bucket = record.first = True
            found[place] = memory.detach()
        if self._of.ranks is None:
            return found
        return {place: self._as_gradient(place, tensor) for place, tensor in found.items()}

    def _as_gradient(self, place: ParamId, memory: torch.Tensor) -> torch.Tensor:
        """The gradient that autograd gets for a parameter: where that is a DTensor, one over this
        memory."""
        return compat.like(self._of.param(place), memory)

    def _is_read(self, place: ParamId, record: RunRecord) -> bool:
        """True if autograd, or another reader, reads it at once."""
        if self.observed or record.is_seen:
            return True
        if record.route is GradRoute.ACCUMULATE_SAME_PASS:
            # added to what an earlier graph gave, which may be read
            before = self.backward.records[place]
            added = not is_gone(self._of.param(place).grad)  # by another thread, meanwhile
            return added or not before.in_bucket or before.watched
        return record.route not in _IN_BUCKET

    def _take_place(self, place: ParamId, record: RunRecord, of_pass: GradientRecord) -> None:
        param = self._of.param(place)
        of_pass.memory, of_pass.in_bucket = self.buffer(*place), True
        of_pass.watched = of_pass.watched or self.observed or record.is_seen
        if is_gone(param.grad):
            param.grad = None
            of_pass.first = True
        elif record.route is GradRoute.ACCUMULATE:
            assert param.grad is not None
            of_pass.before, param.grad = param.grad, None
