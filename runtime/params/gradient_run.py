"""The backward of one captured graph: routes each gradient into its bucket and to autograd.

The parameters are inputs of gates: autograd nodes after a captured graph's node that return each
parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch

from megacompile import compat
from megacompile.ir.buckets import ParamId
from megacompile.ir.stream import Stream
from megacompile.runtime.params.backward_pass import (
    USUAL,
    GradientRecord,
    GradRoute,
    Norms,
    Others,
    ParamUse,
    Wish,
    is_in_bucket,
)
from megacompile.runtime.params.gradient_guards import is_unsummed
from megacompile.runtime.params.guards import opened
from megacompile.runtime.params.parameter_gradients import Gradients, Users, is_there

_OTHERS, _SEVERAL = attrgetter("others"), attrgetter("several")
_BY_GRAPHS = frozenset((ParamUse(Wish.ACCUMULATE, Others.GRAPHS),))


class GradientRun:
    """The backward of one schedule: chooses the route of each gradient. The machine holds it
    (`Machine.run`) from the schedule's start until autograd has the gradients."""

    def __init__(
        self,
        gradients: Gradients,
        places: tuple[ParamId, ...],  # the parameters that the captured graph trains
        users: Sequence[Users],  # of parameters in the same backward; empty: unknown
        *,
        observed: bool = False,  # unknown code may read gradients before `backward()` returns
    ) -> None:
        self._gradients = gradients
        self.backward = gradients.backward_pass()
        self.observed = observed
        self.records: dict[ParamId, GradientRecord] = {}  # records of the schedule's gradients
        self._sent: set[int] = set()  # buckets with copies in flight
        self.all_first = False  # True if all routes are WRITE and none is read before the end
        # parameters with other users, and those whose gradients are not simply accumulated
        self.unusual: dict[ParamId, ParamUse] = {}
        others = frozenset[int]().union(*map(_OTHERS, users))
        several = frozenset[int]().union(*map(_SEVERAL, users))
        ends = gradients.ends(places)
        alone = others.isdisjoint(ends.ids) and several.isdisjoint(ends.ids)
        if users and alone and not ends.hooked() and ends.all_run():
            return
        for place in places:
            param, end = gradients.param(place), gradients.ends((place,))
            if not param.requires_grad:  # frozen since the forward
                self.unusual[place] = ParamUse(Wish.NONE)
                continue
            runs = compat.accumulates_into(end.nodes)
            wish = {None: Wish.RETURN, False: Wish.NONE, True: Wish.ACCUMULATE}[runs]
            if wish is Wish.ACCUMULATE and end.hooked():
                wish = Wish.SHOW
            by = Others.GRAPHS if id(param) in several else Others.NONE
            if not users or id(param) in others:
                by = Others.CODE
            if (use := ParamUse(wish, by)) != USUAL:
                self.unusual[place] = use

    def start(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """Prepare memory for gradients, before the schedule runs; True if the device must
        accumulate into existing ones."""
        places = tuple([(key, i) for key, params in wanted.items() for i in params])
        # the quick check in every step: no gradient exists yet, and no other code contributes to
        # one or reads one. Other graphs may contribute later
        self.all_first = (
            not (self.observed or len(self._gradients.passes) > 1)
            and _BY_GRAPHS.issuperset(self.unusual.values())
            and self.backward.records.keys().isdisjoint(places)
            and self._gradients.ends(places).without_gradients()
        )
        self._gradients.prepare(wanted, self.backward, fresh=self.all_first)
        if self.all_first:
            self.records = {place: GradientRecord() for place in places}  # calls no Python function
            self.backward.records.update(self.records)
            return False
        again = self.records
        self.records = {place: self.backward.records[place] for place in places}
        for place, record in self.records.items():
            if not record.done or place not in again:
                self._begin(place, record)
        for place, record in self.records.items():
            if record.route is GradRoute.SEPARATE and record.use.wish is not Wish.RETURN:
                gradient = self._gradients.param(place).grad
                if is_unsummed(gradient):  # autograd would add to it
                    opened(gradient)  # raises
        same_pass = GradRoute.ACCUMULATE_SAME_PASS
        more = {place[0] for place, record in self.records.items() if record.route is same_pass}
        self.backward.await_copies(more & self.backward.copies.keys())  # before they are fetched
        return any(record.route.adds for record in self.records.values())

    def _begin(self, place: ParamId, record: GradientRecord) -> None:
        record.use = self.unusual.get(place, USUAL)
        record.joined, record.separate = False, None
        record.kept = record.done = False
        by_code, autograd_has = record.use.others is Others.CODE, record.memory is not None
        gradient = self._gradients.param(place).grad
        if record.use.wish is Wish.NONE:
            record.route = GradRoute.DISCARD
        elif autograd_has and not by_code:
            record.route = GradRoute.ACCUMULATE_SAME_PASS
        elif record.use.wish is Wish.RETURN or autograd_has or self._gradients.is_busy(place):
            record.route = GradRoute.SEPARATE  # busy: in another thread's backward()
        elif not is_there(gradient):
            record.route = GradRoute.WRITE
        elif gradient.layout is not torch.strided or not is_in_bucket(
            self._gradients.buckets[place[0]], place[1]
        ):
            record.joined = True
            memory = self._gradients.buckets[place[0]].grads.get(place[1])
            is_free = memory is None or compat.storage_users(memory) == 1  # only the bucket uses it
            record.route = GradRoute.WRITE if is_free else GradRoute.SEPARATE
        elif (
            by_code
            or self._gradients.ends((place,)).hooked_before()
            # autograd adds their sum to `p.grad`
            or (self._gradients.exact and record.use.others is Others.GRAPHS)
        ):
            record.route = GradRoute.SEPARATE
        else:
            record.route = GradRoute.ACCUMULATE

    def may_defer(self) -> bool:
        """True if the sum over replicas can wait for a later backward: only graphs contribute."""
        by_graphs = any(use.others is Others.GRAPHS for use in self.unusual.values())
        if self.observed or (self._gradients.exact and by_graphs):
            return False
        return all(_is_ours(each) and not each.is_seen for each in self.records.values())

    def note_sums(self, *, defers: bool) -> None:
        """Record that the schedule sums over replicas, or defers the sum."""
        for record in filter(_is_ours, self.records.values()):
            record.summed = not defers

    def start_update(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """The same as `start` for a backward that updates: it consumes existing gradients."""
        have: dict[int, Sequence[int]] = {}
        for key, params in wanted.items():
            self._consume(key, params, None)
            if any(is_there(self._gradients.param((key, i)).grad) for i in params):
                have[key] = params
        self._gradients.prepare(have, self.backward)
        for key, params in have.items():
            for i in params:
                if self._gradients.bring_in((key, i)):
                    record = self.records[key, i] = self.backward.records[key, i]
                    record.use = self.unusual.get((key, i), USUAL)
                    record.route = GradRoute.ACCUMULATE
        return bool(self.records)

    def _consume(self, key: int, indices: Iterable[int], norms: Norms | None) -> None:
        for i in indices:
            record = self.backward.records[key, i]
            record.updated, record.norms = True, norms

    def repeat(self) -> None:
        """Prepare a restart of the schedule, which sends no gradient to the host twice."""
        for (key, i), record in self.records.items():
            if record.kept and key not in self._sent and record.route is GradRoute.WRITE:
                self._gradients.buckets[key].grads.pop(i, None)  # its memory is needed
            elif record.kept or key in self._sent:
                record.done = True
            record.kept = False

    # For the ops of the schedule.

    def so_far(self, key: int, index: int) -> torch.Tensor | None:
        record = self.records.get((key, index))
        return self._memory((key, index), record) if record and record.route.adds else None

    def destinations(self, key: int, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """The target memory of a bucket's gradients, by index; without dropped gradients and those
        already in place."""
        if self.all_first:
            grads = self._gradients.buckets[key].grads
            return {i: grads[i] for i in indices}
        records = {i: self.records[key, i] for i in indices}
        return {
            i: self._memory((key, i), record)
            for i, record in records.items()
            if not record.done and record.route is not GradRoute.DISCARD
        }

    def is_final(self, key: int, index: int) -> bool:
        """True if, as far as known, `p.grad` will be the gradient that this schedule computes."""
        record = self.records[key, index]
        return record.route.in_bucket and not self.observed and not record.is_seen

    def _memory(self, place: ParamId, record: GradientRecord) -> torch.Tensor:
        bucket = self._gradients.buckets[place[0]]
        if record.route.in_bucket:
            return bucket.grads[place[1]]
        if record.route is GradRoute.ACCUMULATE_SAME_PASS:
            assert record.memory is not None
            return record.memory
        if record.separate is None:
            like = bucket.values[place[1]]
            record.separate = torch.empty_like(like, dtype=bucket.grad_dtype)
        return record.separate

    def keep(self, key: int, gradients: Mapping[int, torch.Tensor]) -> None:
        bucket, own = self._gradients.buckets[key], dict[int, torch.Tensor]()
        for i, gradient in gradients.items():
            record = self.records[key, i]
            if record.done or record.route is GradRoute.DISCARD:
                continue
            record.kept = True
            if record.route is GradRoute.WRITE:
                own[i] = gradient
            else:
                self._memory((key, i), record).copy_(gradient)
        bucket.keep_grads(own)

    def norms(self, key: int, indices: Iterable[int]) -> Norms:
        found = self.backward.norms[key] = Norms(indices)
        return found

    def update_norms(self, key: int, indices: Sequence[int]) -> Norms:
        """The same, for gradients that an update in this backward consumes."""
        found = Norms(indices)
        self._consume(key, indices, found)
        return found

    def copied(self, key: int, event: torch.cuda.Event | None) -> None:
        """Record that a bucket's gradients are in flight to the host until `event`."""
        self.backward.copies[key] = event
        self._sent.add(key)

    def for_autograd(self) -> dict[ParamId, torch.Tensor]:
        """The gradients for autograd, after the schedule has been issued: autograd can adopt them
        without a copy, because no other reference to these tensors exists."""
        gradients, found = self._gradients, dict[ParamId, torch.Tensor]()
        first = self.all_first and len(gradients.passes) < 2
        if first and gradients.ends(tuple(self.records)).without_gradients():
            for place, record in self.records.items():
                record.memory = memory = gradients.buckets[place[0]].grads[place[1]]
                record.in_bucket = record.first = True
                found[place] = memory.detach()
        else:  # another thread may have set `p.grad` meanwhile
            found = self._others_for_autograd()
        if gradients.ranks is None:
            return found
        # a DTensor parameter's gradient is a DTensor over this memory
        return {at: compat.like(gradients.param(at), memory) for at, memory in found.items()}

    def _others_for_autograd(self) -> dict[ParamId, torch.Tensor]:
        """The same, for gradients that may be read, or be added to `p.grad`."""
        if len(self._gradients.passes) > 1 or any(
            self._is_read(*item) for item in self.records.items()
        ):
            self.backward.await_copies(self.backward.copies)
            self._gradients.streams.synchronize(Stream.D2H)
        found = {}
        for place, record in self.records.items():
            if record.updated:
                continue
            if record.route.in_bucket:
                record.memory = memory = self._memory(place, record)
                record.in_bucket = True
                record.watched = record.watched or self.observed or record.is_seen
                param = self._gradients.param(place)
                if not is_there(param.grad):
                    param.grad, record.first = None, True
                elif record.route is GradRoute.ACCUMULATE:  # autograd adopts the bucket's memory
                    record.before, param.grad = param.grad, None
            elif record.route is GradRoute.SEPARATE:
                memory, record.separate = self._memory(place, record), None
                if record.use.others is not Others.CODE:
                    record.memory = memory
            else:
                continue
            found[place] = memory.detach()
        return found

    def _is_read(self, place: ParamId, record: GradientRecord) -> bool:
        """True if autograd or another reader reads it at once."""
        if self.observed or record.is_seen:
            return True
        if record.route is GradRoute.ACCUMULATE_SAME_PASS:
            # added to an earlier graph's gradient, which may be read
            added = is_there(self._gradients.param(place).grad)  # set by another thread meanwhile
            return added or not record.in_bucket or record.watched
        return not record.route.in_bucket


def _is_ours(record: GradientRecord) -> bool:
    return record.route.in_bucket or record.route is GradRoute.ACCUMULATE_SAME_PASS
