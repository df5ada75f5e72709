"""The gradients of a model's parameters: their places in the buckets, and their current holders."""

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
from megacompile.runtime.params.gradient_guards import (
    is_taken,
    is_unsummed,
    lazy_of,
    leave_unsummed,
    sum_late,
)
from megacompile.runtime.params.host_bucket import HostBucket, set_storage


class Gradients:
    """The gradients of a model's parameters, by bucket and index. Owned by the machine.

    Args:
        streams: the streams for copies to the host.
        exact: accumulate bitwise in autograd's order, even if that takes more memory.
        ranks: the ranks that share the parameters, if any.
    """

    def __init__(self, streams: Streams, *, exact: bool = True, ranks: Ranks | None = None) -> None:
        self.streams = streams
        self.exact = exact
        self.ranks = ranks
        self.buckets: dict[int, HostBucket] = {}
        self._places: dict[int, ParamId] = {}  # id(parameter) -> place
        self._ends: dict[ParamId, Accumulator] = {}
        self._together: dict[tuple[ParamId, ...], Accumulators] = {}  # nodes, per graph
        self._passes: dict[int, BackwardPass] = {}  # running backwards, by autograd's number
        self._followed = False  # True if a parameter got a new AccumulateGrad node

    def bind(self, buckets: Mapping[int, HostBucket]) -> None:
        """Use these buckets from now on."""
        self.buckets = dict(buckets)
        self._ends.clear()  # a parameter that moved to another device has a new node
        self._together.clear()
        self._followed = False
        self._places = {
            id(param): (key, i)
            for key, bucket in self.buckets.items()
            for i, param in enumerate(bucket.params)
        }

    def place(self, param: torch.Tensor) -> ParamId | None:
        """A parameter's bucket and index; None for another model's parameter."""
        return self._places.get(id(param))

    def param(self, place: ParamId) -> nn.Parameter:
        """The parameter at a place."""
        return self.buckets[place[0]].params[place[1]]

    def end(self, place: ParamId) -> Accumulator:
        """The AccumulateGrad node of a parameter."""
        if place not in self._ends:
            self._ends[place] = Accumulator(self.param(place))
        return self._ends[place]

    def ends(self, places: tuple[ParamId, ...]) -> Accumulators:
        """The AccumulateGrad nodes of several parameters."""
        found = self._together.get(places)
        if found is None:
            found = self._together[places] = Accumulators([self.end(place) for place in places])
        return found

    def follow(self, places: tuple[ParamId, ...], nodes: Sequence[object]) -> bool:
        """Record the AccumulateGrad nodes of parameters; True if any is new.

        A parameter gets a new node when its data temporarily had another dtype or was replaced in
        place (`p.set_()`).
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
        """True if proxies lead to outdated AccumulateGrad nodes.

        A hook that waits for a gradient would be called for both nodes. Without a hook, a call
        detects new nodes by its gates (`follow`), and checking before the next call is early
        enough.
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
        """The `backward()` call that runs in this thread."""
        number = compat.backward_id()
        if number not in self._passes:
            found = self._passes[number] = BackwardPass(
                self.streams, self.buckets, self.ranks, folds=not self.exact
            )

            def finish() -> None:
                del self._passes[number]
                found.finish()

            # a failing call drops `finish` without calling it
            dropped = weakref.finalize(finish, _give_up, self._passes, number, found)
            dropped.atexit = False
            compat.when_backward_ends(finish)
        return self._passes[number]

    @property
    def several_passes(self) -> bool:
        """True if several threads run `backward()`; any of them may accumulate first."""
        return len(self._passes) > 1

    def is_ours(self, place: ParamId) -> bool:
        """True if `p.grad` is in place in the bucket."""
        return lies_in_bucket(self.buckets[place[0]], place[1])

    def is_free(self, place: ParamId) -> bool:
        """True if only the bucket references a gradient's memory."""
        memory = self.buckets[place[0]].grads.get(place[1])
        return memory is None or compat.storage_users(memory) == 1

    def is_busy(self, place: ParamId) -> bool:
        """True if a running `backward()` has returned this gradient to autograd."""
        # a copy, because threads start and end backwards meanwhile
        return any([backward.has(place) for backward in tuple(self._passes.values())])

    def prepare(
        self,
        wanted: Mapping[int, Sequence[int]],
        unwanted: set[ParamId],
        backward: BackwardPass,
        *,
        fresh: bool = False,
    ) -> None:
        """Allocate these gradients; their `p.grad` are plain tensors from now on.

        Gradients of resident buckets are allocated by the backward.

        Args:
            wanted: bucket key -> parameter indices.
            unwanted: the parameters that autograd does not request.
            backward: their backward.
            fresh: True if no parameter has a `p.grad`.
        """
        for key, params in wanted.items():
            bucket = self.buckets[key]
            bucket.pending.settle()
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
        """Copy a user's gradient into its place in the bucket; False if there is none."""
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
        """Sum unsummed gradients over replicas before they are read."""
        if self.ranks is not None and self.ranks.replicas > 1:
            names = {self.buckets[k].layout.params[i].name: self.param((k, i)) for k, i in places}
            sum_late(names, self.ranks)

    def forget(self) -> None:
        """Free gradients on the device that `p.grad` no longer references, after `zero_grad()`."""
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
        """True if resident buckets have gradients."""
        return any(
            is_there(param.grad)
            for bucket in self.buckets.values()
            if bucket.resident is not None
            for param in bucket.params
        )

    def _part(self, places: Iterable[ParamId]) -> None:
        """Move a `p.grad` that uses another parameter's place to its own memory."""
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
        """Take a bucket's gradients out of `p.grad`, by parameter index; also returns the indices
        of unsummed ones."""
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
        """Put gradients into a bucket that has moved."""
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
        """True if a gradient removed by `zero_grad()` is still referenced."""
        for i, memory in bucket.grads.items():
            if compat.storage_users(memory) > 1 and not is_there(bucket.params[i].grad):
                if not self.is_busy((key, i)):
                    return True
        return False

    def _renew(self, key: int, bucket: HostBucket) -> None:
        """Reallocate a bucket's gradients; gradients in use are copied."""
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
                set_storage(gradient, bucket.grads[i])  # p.grad stays the same tensor object
            elif self.is_busy((key, i)):  # autograd has it
                bucket.grads[i] = before


def _open(gradient: torch.Tensor | None) -> None:
    """Make a lazy gradient plain before it changes."""
    who = lazy_of(gradient)
    if gradient is not None and who is not None:
        who.open(gradient)


def _give_up(passes: dict[int, BackwardPass], number: int, found: BackwardPass) -> None:
    """Called when a backward ends; without a `finish` call, it has failed."""
    if passes.get(number) is found:
        del passes[number]
        found.give_up()


def is_there(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """True if a gradient exists to accumulate into; an update in the backward leaves none."""
    return gradient is not None and not is_taken(gradient)
