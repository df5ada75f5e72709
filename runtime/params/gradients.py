"""The gradients of a model's parameters: where they are in host buckets, and who has them now."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TypeGuard

import torch
from torch import nn

from megacompile import compat
from megacompile.ir.buckets import ParamId
from megacompile.ir.stream import Stream
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.params.accumulators import Accumulator, Accumulators
from megacompile.runtime.params.backward_pass import (
    BackwardPass,
    lies_in_bucket,
    same_memory,
)
from megacompile.runtime.params.bucket import HostBucket, set_storage
from megacompile.runtime.params.gradient_guards import (
    is_taken,
    is_unsummed,
    lazy_of,
    leave_unsummed,
    sum_late,
)


class Gradients:
    """The gradients of a model's parameters, by bucket and position. The machine has it for good.

    Args:
        streams: that copies to the host are made on.
        exact: add in autograd's order, bit by bit, even where that takes more memory.
        ranks: that share the parameters, if any do.
    """

    def __init__(self, streams: Streams, *, exact: bool = True, ranks: Ranks | None = None) -> None:
        self.streams = streams
        self.exact = exact
        self.ranks = ranks
        self.buckets: dict[int, HostBucket] = {}
        self._places: dict[int, ParamId] = {}  # id(parameter) -> place
        self._ends: dict[ParamId, Accumulator] = {}
        self._together: dict[tuple[ParamId, ...], Accumulators] = {}  # of these, for each graph
        self._passes: dict[int, BackwardPass] = {}  # those that run, by autograd's number
        self._followed = False  # did a parameter get another AccumulateGrad node?

    def bind(self, buckets: Mapping[int, HostBucket]) -> None:
        """Use these buckets from now on."""
        self.buckets = dict(buckets)
        self._ends.clear()  # a parameter that has moved to another device has another
        self._together.clear()
        self._followed = False
        self._places = {
            id(param): (key, i)
            for key, bucket in self.buckets.items()
            for i, param in enumerate(bucket.params)
        }

    def place(self, param: torch.Tensor) -> ParamId | None:
        """A parameter's bucket and index; None for one that is not ours."""
        return self._places.get(id(param))

    def param(self, place: ParamId) -> nn.Parameter:
        """The parameter of a place."""
        return self.buckets[place[0]].params[place[1]]

    def end(self, place: ParamId) -> Accumulator:
        """The AccumulateGrad node of a parameter."""
        if place not in self._ends:
            self._ends[place] = Accumulator(self.param(place))
        return self._ends[place]

    def ends(self, places: tuple[ParamId, ...]) -> Accumulators:
        """Those of several parameters."""
        found = self._together.get(places)
        if found is None:
            found = self._together[places] = Accumulators([self.end(place) for place in places])
        return found

    def follow(self, places: tuple[ParamId, ...], nodes: Sequence[object]) -> bool:
        """Notes these as the AccumulateGrad nodes of parameters; true if they were others before.

        A parameter has another one when its data were of another dtype for a while, or were
        exchanged in place (`p.set_()`).
        """
        if all(map(operator.is_, self.ends(places).nodes, nodes)):
            return False
        stale = [
            place
            for place, node in zip(places, nodes, strict=True)
            if self.end(place).node is not node
        ]
        for place in stale:
            del self._ends[place]
        self._together.clear()
        self._followed |= bool(stale)
        return bool(stale)

    def outdated(self) -> bool:
        """True if proxies lead to AccumulateGrad nodes that are not those of their parameters any
        more.

        Where a hook waits for a gradient it would be called for both. Without one a call finds out
        by its gates (`follow`), and it is in time to ask before the next one.
        """
        ends = self._ends.values()
        if self._followed or not compat.any_accumulate_hooks([end.param for end in ends]):
            return self._followed
        return any(
            end.param.requires_grad
            and compat.post_accumulate_hooks(end.param)
            and compat.accumulator_of(end.param) is not end.node
            for end in ends
        )

    def backward_pass(self) -> BackwardPass:
        """The call of `backward()` that runs in this thread."""
        number = compat.backward_id()
        if number not in self._passes:
            found = self._passes[number] = BackwardPass(
                self.streams, self.buckets, self.ranks, folds=not self.exact
            )

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

    def is_ours(self, place: ParamId) -> bool:
        """True if `p.grad` is in its place in the bucket."""
        return lies_in_bucket(self.buckets[place[0]], place[1])

    def is_free(self, place: ParamId) -> bool:
        """True if nothing but the bucket has the memory of a gradient."""
        memory = self.buckets[place[0]].grads.get(place[1])
        return memory is None or compat.storage_users(memory) == 1

    def is_busy(self, place: ParamId) -> bool:
        """True if a call of `backward()` has given autograd a gradient, and has not ended."""
        # a copy: a thread may begin or end one meanwhile
        return any([backward.has(place) for backward in tuple(self._passes.values())])

    def prepare(
        self,
        wanted: Mapping[int, Sequence[int]],
        unwanted: set[ParamId],
        backward: BackwardPass,
        *,
        fresh: bool = False,
    ) -> None:
        """Get memory for these gradients, whose `p.grad` are plain tensors from now on.

        Those of buckets that live on the device get theirs when the backward has made them.

        Args:
            wanted: parameters' indices, by their bucket's key.
            unwanted: those of them that autograd does not ask for.
            backward: that they are of.
            fresh: none of them has a `p.grad`.
        """
        for key, params in wanted.items():
            bucket = self.buckets[key]
            bucket.pending.wait()
            bucket.pending.withdraw()
            if not unwanted or not unwanted.issuperset([(key, i) for i in params]):
                backward.norms.pop(key, None)
            for i in () if fresh else params:
                _open(bucket.params[i].grad)
            if bucket.resident is not None:
                self._forget(key, bucket)
            elif not bucket.grads.keys() >= set(params) or self._held_by_user(key, bucket):
                self._renew(key, bucket)
        if not fresh:
            self._part([(key, i) for key, params in wanted.items() for i in params])

    def bring_in(self, place: ParamId) -> bool:
        """Copy a gradient of the user's into its place in the bucket; False if there is none."""
        gradient = self.param(place).grad
        if not is_there(gradient):
            return False
        if not self.is_ours(place):
            key, i = place
            bucket = self.buckets[key]
            memory = bucket.grads[i] if bucket.resident is None else bucket.make_grad(i)
            with torch.no_grad():
                memory.copy_(compat.local(gradient).to_dense())
        return True

    def sum_late(self, places: Iterable[ParamId]) -> None:
        """Sum over replicas what lacks that, because it is about to be read."""
        if self.ranks is not None and self.ranks.replicas > 1:
            names = {self.buckets[k].layout.params[i].name: self.param((k, i)) for k, i in places}
            sum_late(names, self.ranks)

    def forget(self) -> None:
        """Frees gradients on the device that `p.grad` names no more: after `zero_grad()`."""
        for key, bucket in self.buckets.items():
            if bucket.resident is not None and bucket.grads:
                self._forget(key, bucket)

    def _forget(self, key: int, bucket: HostBucket) -> None:
        now = [param.grad for param in bucket.params]
        if not self._passes and {type(None)}.issuperset(map(type, now)):
            bucket.grads.clear()
            return
        for i in [i for i in bucket.grads if not self.is_busy((key, i))]:
            if not is_there(bucket.params[i].grad) or not self.is_ours((key, i)):
                del bucket.grads[i]

    def on_device(self) -> bool:
        """True if there are gradients of buckets that live on the device."""
        return any(
            is_there(param.grad)
            for bucket in self.buckets.values()
            if bucket.resident is not None
            for param in bucket.params
        )

    def _part(self, places: Iterable[ParamId]) -> None:
        """Give a `p.grad` that is in the place of another one's memory of its own."""
        now = [(place, self.param(place).grad) for place in places]
        there = [(place, gradient) for place, gradient in now if is_there(gradient)]
        if not there:  # as after zero_grad()
            return
        buffers = {
            g.data_ptr(): (k, i) for k, b in self.buckets.items() for i, g in b.grads.items()
        }
        for place, gradient in there:
            if gradient.layout is not torch.strided:
                continue
            mine = compat.local(gradient)
            if mine.numel() and buffers.get(mine.data_ptr(), place) != place:
                set_storage(gradient, mine.detach().clone())

    def take(self, key: int) -> tuple[dict[int, torch.Tensor], set[int]]:
        """Take a bucket's gradients out of `p.grad`: by the parameter's index; and which of them
        lack their sum over replicas."""
        bucket = self.buckets[key]
        taken, lacking = {}, set()
        for i, param in enumerate(bucket.params):
            gradient = param.grad
            if gradient is None or is_taken(gradient):
                continue
            _open(gradient)
            taken[i] = compat.local(gradient).detach()
            if is_unsummed(gradient):
                lacking.add(i)
            param.grad = None
        return taken, lacking

    @staticmethod
    def put(bucket: HostBucket, taken: Mapping[int, torch.Tensor], lacking: Set[int]) -> None:
        """Put them into a bucket that is elsewhere."""
        if taken and bucket.resident is None:
            bucket.make_grads()
        for i, gradient in taken.items():
            param = bucket.params[i]
            if bucket.resident is not None and param.requires_grad:
                bucket.make_grad(i)
            if i in bucket.grads:
                param.grad = compat.like(param, bucket.grads[i].copy_(gradient).detach())
            else:  # frozen since
                param.grad = compat.like(param, gradient.to(bucket.values[i].device))
            if i in lacking:
                leave_unsummed(param, bucket.layout.params[i].name)

    def _held_by_user(self, key: int, bucket: HostBucket) -> bool:
        """True if a gradient that `zero_grad()` took out of `p.grad` is still held."""
        for i, memory in bucket.grads.items():
            if compat.storage_users(memory) > 1 and not is_there(bucket.params[i].grad):
                if not self.is_busy((key, i)):
                    return True
        return False

    def _renew(self, key: int, bucket: HostBucket) -> None:
        """New memory for a bucket's gradients; what is in use moves along."""
        old = bucket.grads
        bucket.make_grads()
        for i, before in old.items():
            gradient = bucket.params[i].grad
            if is_there(gradient) and same_memory(gradient, before):
                if i not in bucket.grads:  # it was frozen since
                    bucket.grads[i] = before
                    continue
                self.streams.synchronize(Stream.D2H)
                bucket.grads[i].copy_(before)
                set_storage(gradient, bucket.grads[i])  # p.grad stays the tensor that it is
            elif self.is_busy((key, i)):  # autograd has it
                bucket.grads[i] = before


def _open(gradient: torch.Tensor | None) -> None:
    """Make a lazy gradient a plain one: it is about to change."""
    who = lazy_of(gradient)
    if gradient is not None and who is not None:
        who.open(gradient)


def _give_up(passes: dict[int, BackwardPass], number: int, found: BackwardPass) -> None:
    """A backward has ended; if `finish` was not called, it has failed."""
    if passes.get(number) is found:
        del passes[number]
        found.give_up()


def is_there(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """True if there is something to accumulate into: an update in the backward leaves nothing."""
    return gradient is not None and not is_taken(gradient)
