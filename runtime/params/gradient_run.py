"""The routes of the gradients of captured graphs: into the host buckets, and from there to
autograd.

The parameters are inputs of gates, autograd nodes behind a captured graph's own, which hand each of
them its gradient.
For each parameter there is one of these routes (`GradRoute`):

    WRITE        into the bucket, whose memory autograd takes as `p.grad` without a copy
    ACCUMULATE   the bucket has a gradient already: the device adds, and the total goes into the
                 bucket. It was `p.grad`, which is taken away, and autograd gets the total instead
    ACCUMULATE_SAME_PASS
                 the same where the gradient so far is that of an earlier graph in this very
                 backward: autograd has its memory already, and gets nothing more
    SEPARATE     into memory of its own, and autograd adds: the difference could be seen
    DISCARD      nowhere: autograd does not ask for it
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megacompile import compat
from megacompile.ir.buckets import ParamId
from megacompile.ir.stream import Stream
from megacompile.runtime.params.accumulators import Users
from megacompile.runtime.params.backward_pass import Norms
from megacompile.runtime.params.gradients import Gradients, is_gone


class GradRoute(enum.Enum):
    """The route of one gradient."""

    WRITE = enum.auto()
    ACCUMULATE = enum.auto()
    ACCUMULATE_SAME_PASS = enum.auto()
    SEPARATE = enum.auto()
    DISCARD = enum.auto()


_IN_BUCKET = (GradRoute.WRITE, GradRoute.ACCUMULATE)
_ADDS = (GradRoute.ACCUMULATE, GradRoute.ACCUMULATE_SAME_PASS)


@dataclass(slots=True)
class Uses:
    """The other uses of parameters in the backward of one schedule."""

    observed: bool  # unseen code reads gradients before `backward()` returns
    shared: set[ParamId] = field(default_factory=set)  # others use them too
    several: set[ParamId] = field(default_factory=set)  # several graphs do
    hooked: set[ParamId] = field(default_factory=set)
    captured: set[ParamId] = field(default_factory=set)  # autograd.grad() was called for them
    unwanted: set[ParamId] = field(default_factory=set)

    @staticmethod
    def of(
        gradients: Gradients,
        places: Iterable[ParamId],
        users: Sequence[Users],
        *,
        observed: bool,
    ) -> Uses:
        """Those of the parameters that a captured graph trains; arguments: see `GradientRun`."""
        found = Uses(observed)
        others = frozenset().union(*[each.others for each in users])
        several = frozenset().union(*[each.several for each in users])
        places = tuple(places)
        ends = gradients.ends(places)
        alone = others.isdisjoint(ends.ids) and several.isdisjoint(ends.ids)
        if users and alone and not ends.hooked and ends.all_run:
            return found
        for place in places:
            if not gradients.param(place).requires_grad:  # frozen since the forward
                found.unwanted.add(place)
                continue
            end = gradients.end(place)
            runs = end.runs
            if runs is None:
                found.captured.add(place)
            elif not runs:
                found.unwanted.add(place)
            elif end.hooked:
                found.hooked.add(place)
            key = id(end.param)
            if not users or key in others:
                found.shared.add(place)
            elif key in several:
                found.several.add(place)
        return found

    @property
    def exceptions(self) -> set[ParamId]:
        """The parameters whose gradients cannot stay on the device."""
        return self.hooked | self.captured | self.unwanted


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
        self.uses = Uses.of(gradients, places, users, observed=observed)
        self.joined: set[ParamId] = set()  # autograd adds to a `p.grad` that is not in the bucket
        self.routes: dict[ParamId, GradRoute] = {}
        self.apart: dict[ParamId, torch.Tensor] = {}
        self._sent: set[int] = set()  # buckets that are on their way
        self._kept: set[ParamId] = set()  # by buckets that live on the device
        self._done: set[ParamId] = set()  # by an attempt that ran out of memory
        self.all_first = False  # do all go there, and is none read before the end?

    def start(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """Prepare memory for gradients; True if there are some already to add to on the device.

        Called in a backward, before its schedule runs.
        """
        places = [(key, i) for key, params in wanted.items() for i in params]
        self.all_first = False
        if self._are_first(places):
            self._of.prepare(wanted, self.uses.unwanted, self.backward, fresh=True)
            self.routes = dict.fromkeys(places, GradRoute.WRITE)
            self.all_first = True
            return False
        self._of.prepare(wanted, self.uses.unwanted, self.backward)
        for place in places:
            if place not in self._done:
                self.routes[place] = self._route(place)
        captured = self.uses.captured  # to whose gradients nothing is added
        added = [
            at for at in places if self.routes[at] is GradRoute.SEPARATE and at not in captured
        ]
        self._of.sum_late(added)
        more = {
            place[0] for place in places if self.routes[place] is GradRoute.ACCUMULATE_SAME_PASS
        }
        self.backward.await_copies(more & self.backward.copies.keys())  # before they are fetched
        return any(self.routes[place] in _ADDS for place in places)

    def _are_first(self, places: Sequence[ParamId]) -> bool:
        """Is there no gradient yet, and no other code that has a part in one, or reads one? The
        quick look, for every parameter in every step."""
        uses = self.uses
        if uses.exceptions or uses.observed or uses.shared or self._done:
            return False
        if self._of.several_passes or not self.backward.autograd_has.keys().isdisjoint(places):
            return False
        return self._of.ends(tuple(places)).without_gradients

    def may_defer(self) -> bool:
        """May the sum over replicas wait for a later backward? Not where other code has a part
        in a gradient: it may be read before that."""
        if self._of.exact and self.uses.several:
            return False
        ours = (*_IN_BUCKET, GradRoute.ACCUMULATE_SAME_PASS)
        return all(route in ours and not self.watches(at) for at, route in self.routes.items())

    def note_sums(self, *, defers: bool) -> None:
        """The schedule sums over replicas; or, where it defers, it does not."""
        ours = {
            at
            for at, route in self.routes.items()
            if route in (*_IN_BUCKET, GradRoute.ACCUMULATE_SAME_PASS)
        }
        made, left = self.backward.summed, self.backward.unsummed
        if defers:
            made, left = left, made
        made |= ours
        left -= ours

    def start_update(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """The same where the backward updates: it takes the gradients that there are, and keeps
        none on the host."""
        self.backward.updated |= {(key, i): None for key, params in wanted.items() for i in params}
        have = {
            key: params
            for key, params in wanted.items()
            if any(not is_gone(self._of.param((key, i)).grad) for i in params)
        }
        self._of.prepare(have, self.uses.unwanted, self.backward)
        for key, params in have.items():
            for i in params:
                if self._of.bring_in((key, i)):
                    self.routes[key, i] = GradRoute.ACCUMULATE
        return bool(self.routes)

    def _route(self, place: ParamId) -> GradRoute:
        if place in self.uses.unwanted:
            return GradRoute.DISCARD
        if place in self.backward.autograd_has and place not in self.uses.shared:
            return GradRoute.ACCUMULATE_SAME_PASS
        if place in self.uses.captured or place in self.backward.autograd_has:
            return GradRoute.SEPARATE
        if self._of.is_busy(place):  # in another backward(), of another thread
            return GradRoute.SEPARATE
        gradient = self._of.param(place).grad
        if is_gone(gradient) or gradient is None:
            return GradRoute.WRITE
        if gradient.layout is not torch.strided or not self._of.is_ours(place):
            self.joined.add(place)
            return GradRoute.WRITE if self._of.is_free(place) else GradRoute.SEPARATE
        alone = place not in self.uses.shared and not self._of.end(place).hooked_before
        if self._of.exact and place in self.uses.several:  # autograd adds their sum to `p.grad`
            alone = False
        return GradRoute.ACCUMULATE if alone else GradRoute.SEPARATE

    def repeat(self) -> None:
        """The schedule starts again: what it has sent to the host is not sent twice."""
        self._done |= {place for place in self.routes if place[0] in self._sent}
        for key, i in self._kept:
            if self.routes[key, i] is GradRoute.WRITE:  # its memory is wanted: it is computed again
                self._of.buckets[key].grads.pop(i, None)
            else:
                self._done.add((key, i))
        self._kept.clear()

    # For the ops of the schedule.

    def so_far(self, key: int, index: int) -> torch.Tensor | None:
        """The host gradient to add to; None where there is none."""
        return self.buffer(key, index) if self.routes.get((key, index)) in _ADDS else None

    def drops(self, key: int, index: int) -> bool:
        """True if a gradient goes nowhere, or is there already."""
        return (key, index) in self._done or self.routes[key, index] is GradRoute.DISCARD

    def drops_any(self, key: int, indices: Iterable[int]) -> bool:
        """True if any of these is such a one."""
        return any(self.drops(key, i) for i in indices)

    def drops_all(self, key: int, indices: Iterable[int]) -> bool:
        """True if all of these are such ones."""
        return all(self.drops(key, i) for i in indices)

    def is_final(self, key: int, index: int) -> bool:
        """True if `p.grad` will be what this schedule computes, as far as can be known."""
        place = key, index
        return self.routes[place] in _IN_BUCKET and not self.watches(place)

    def watches(self, place: ParamId) -> bool:
        """True if a gradient is read before `backward()` returns."""
        looks = place in self.uses.hooked or place in self.uses.shared or place in self.joined
        return self.uses.observed or looks

    def buffer(self, key: int, index: int) -> torch.Tensor:
        """The route of a gradient."""
        place = key, index
        bucket, route = self._of.buckets[key], self.routes[place]
        if route in _IN_BUCKET:
            return bucket.grads[index]
        if route is GradRoute.ACCUMULATE_SAME_PASS:
            return self.backward.autograd_has[place]
        if place not in self.apart:
            self.apart[place] = torch.empty_like(bucket.values[index], dtype=bucket.grad_dtype)
        return self.apart[place]

    def keep_all(self, key: int, gradients: Mapping[int, torch.Tensor]) -> None:
        """Gives a bucket that lives on the device its gradients, by index."""
        if self.all_first:
            self._of.buckets[key].keep_grads(gradients)
            self._kept.update([(key, i) for i in gradients])
            return
        for i, gradient in gradients.items():
            if not self.drops(key, i):
                self.keep(key, i, gradient)

    def keep(self, key: int, index: int, gradient: torch.Tensor) -> None:
        """Gives a bucket that lives on the device a gradient."""
        if self.routes[key, index] is GradRoute.WRITE:
            self._of.buckets[key].keep_grads({index: gradient})
        else:
            self.buffer(key, index).copy_(gradient)
        self._kept.add((key, index))

    def norms(self, key: int, indices: Sequence[int]) -> Norms:
        """The route of the norms of these gradients."""
        found = self.backward.norms[key] = Norms(tuple(indices))
        return found

    def update_norms(self, key: int, indices: Sequence[int]) -> Norms:
        """The same, of gradients that an update in this backward takes."""
        found = Norms(tuple(indices))
        self.backward.updated |= {(key, i): found for i in indices}
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
        if self._of.several_passes or any(self._is_read(*item) for item in self.routes.items()):
            self.backward.await_copies(self.backward.copies)
            self._of.streams.synchronize(Stream.D2H)
        found = {}
        for place, route in self.routes.items():
            if place in self.backward.updated:
                continue
            if route in _IN_BUCKET:
                self._take_place(place, route)
                found[place] = self._as_gradient(place, self.buffer(*place).detach())
            elif route is GradRoute.SEPARATE:
                memory = self.buffer(*place)
                del self.apart[place]
                if place not in self.uses.shared:
                    self.backward.autograd_has[place] = memory
                found[place] = self._as_gradient(place, memory.detach())
        return found

    def _are_still_first(self) -> bool:
        """True if no `p.grad` was made meanwhile, as another thread may."""
        if not self.all_first or self._of.several_passes or self.backward.updated:
            return False
        return self._of.ends(tuple(self.routes)).without_gradients

    def _first_for_autograd(self) -> dict[ParamId, torch.Tensor]:
        """The same where all of them are the first ones, and none is read."""
        backward, buckets = self.backward, self._of.buckets
        memory = {place: buckets[place[0]].grads[place[1]] for place in self.routes}
        backward.autograd_has |= memory
        backward.taken.update(memory)
        backward.fresh.update(memory)
        given = {place: tensor.detach() for place, tensor in memory.items()}
        if self._of.ranks is None:
            return given
        return {place: self._as_gradient(place, tensor) for place, tensor in given.items()}

    def _as_gradient(self, place: ParamId, memory: torch.Tensor) -> torch.Tensor:
        """The gradient that autograd gets for a parameter: where that is a DTensor, one over this
        memory."""
        return compat.like(self._of.param(place), memory)

    def _is_read(self, place: ParamId, route: GradRoute) -> bool:
        """True if autograd, or another reader, reads it at once."""
        if self.watches(place):
            return True
        if route is GradRoute.ACCUMULATE_SAME_PASS:
            # added to what an earlier graph gave, which may be read
            added = not is_gone(self._of.param(place).grad)  # by another thread, meanwhile
            return added or place not in self.backward.taken or place in self.backward.watched
        return route not in _IN_BUCKET

    def _take_place(self, place: ParamId, route: GradRoute) -> None:
        backward, param = self.backward, self._of.param(place)
        backward.autograd_has[place] = self.buffer(*place)
        backward.taken.add(place)
        if self.watches(place):
            backward.watched.add(place)
        if is_gone(param.grad):
            param.grad = None
            backward.fresh.add(place)
        elif route is GradRoute.ACCUMULATE:
            assert param.grad is not None
            backward.replaced[place] = param.grad
            param.grad = None
