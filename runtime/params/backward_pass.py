"""One call of `backward()`: what captured graphs hand to autograd, and what is left at its end.

Autograd accumulates: it takes a gradient that is in a bucket as `p.grad` without a copy, adds
where something is there already, and runs the hooks. Copies to the host may still be on their way
then. When `backward()` ends they are waited for, `p.grad` learns to answer for its norm, and sums
that autograd made elsewhere go into the bucket.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from megacompile import compat
from megacompile.ir.buckets import ParamId
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.optim.blockwise import is_shared
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.gradient_guards import (
    fold,
    leave_unsummed,
    make_lazy,
    note_sum,
    sum_late,
    take,
)
from megacompile.runtime.params.gradient_record import GradientRecord, Norms, Totals
from megacompile.runtime.params.guards import guard_of

LEAST_FOLDED = 4 * 2**20  # bytes of a gradient on average: to scale fewer takes a GPU less time
# than the host needs to guard the gradient


class BackwardPass:
    """The gradients of one call of `backward()`; `Gradients` has it until that ends.

    Args:
        folds: the update of a bucket on the device multiplies its gradients by a factor itself.
    """

    def __init__(
        self,
        streams: Streams,
        buckets: Mapping[int, HostBucket],
        ranks: Ranks | None = None,
        *,
        folds: bool = False,
    ) -> None:
        self.folds = folds
        self.ranks = ranks
        self.totals = None if ranks is None else Totals(ranks)
        self.streams = streams
        self.buckets = buckets
        self.records: dict[ParamId, GradientRecord] = {}
        self.last = True  # before the step, as far as is known
        self.norms: dict[int, Norms] = {}  # by bucket
        self.copies: dict[int, torch.cuda.Event | None] = {}  # by bucket: its way to the host

    def record(self, place: ParamId) -> GradientRecord:
        """The record of a parameter, made at first."""
        found = self.records.get(place)
        if found is None:
            found = self.records[place] = GradientRecord()
        return found

    def has(self, place: ParamId) -> bool:
        """True if autograd has a gradient of a parameter."""
        found = self.records.get(place)
        return found is not None and found.memory is not None

    def await_copies(self, keys: Iterable[int]) -> None:
        """Wait on the host for the copies of some buckets' gradients."""
        for key in keys:
            event = self.copies[key]
            if event is None:
                continue
            if self.buckets[key].resident is None:
                event.synchronize()
            else:  # who reads them does so on the compute stream
                self.streams.wait_on_compute(event)

    def give_up(self) -> None:
        """It has failed: what was taken out of `p.grad` and not accumulated goes back, and what was
        accumulated may be read."""
        self.await_copies(self.copies)
        for (key, i), record in self.records.items():
            param = self.buckets[key].params[i]
            if record.before is not None and param.grad is None:
                param.grad = record.before
        self._leave_unsummed()

    def finish(self) -> None:
        """`backward()` ends: every `p.grad` is a tensor that anybody may use.

        A reader of one finds the copy to the host done: it is waited for here, but for buckets
        whose update the device will make, whose gradients are guarded and wait when they are read.
        """
        taken = [place for place, record in self.records.items() if record.in_bucket]
        updated = [(place, each) for place, each in self.records.items() if each.updated]
        in_place = self._in_place(taken)
        lazy = self._lazy(in_place)
        if taken or not updated:
            self.await_copies(self.copies.keys() - lazy)
        for (key, i), record in updated:
            norms = record.norms
            of_it = None if norms is None else partial(self._norms, norms, norms.indices.index(i))
            take(self.buckets[key].params[i], self.buckets[key].layout.params[i].name, of_it)
        if len(in_place) < len(taken) or any([self.records[at].before is not None for at in taken]):
            for place in sorted(taken):
                self._settle_down(place)
            in_place = self._in_place(taken)
        if self.ranks is not None and self.ranks.replicas > 1:
            self._sum(self.ranks)
        quiet = {place for place in in_place if not self.records[place].watched}
        self._serve(quiet, lazy)
        if self.folds:
            self._fold(quiet)
        # who asks for norms keeps this, and not the gradients: the next ones go into their memory
        self.records.clear()

    def _sum(self, ranks: Ranks) -> None:
        """Note which gradients are summed over replicas. After a last backward all are: those of
        earlier ones that it has not added to, as of another graph, are summed here."""
        for (key, i), record in self.records.items():
            if record.summed:
                note_sum(self.buckets[key].params[i])
        self._leave_unsummed()
        if not self.last:
            return
        buckets = self.buckets.values()
        params = {
            of.name: param
            for bucket in buckets
            for of, param in zip(bucket.layout.params, bucket.params, strict=True)
        }
        sum_late(params, ranks)

    def _leave_unsummed(self) -> None:
        for (key, i), record in self.records.items():
            if record.summed is False:
                leave_unsummed(self.buckets[key].params[i], self.buckets[key].layout.params[i].name)

    def _in_place(self, taken: Sequence[ParamId]) -> set[ParamId]:
        """The gradients, of these, that are in their places in the buckets. All of them are asked
        about at once first, as there are many in every step."""
        buckets, address = self.buckets, torch.Tensor.data_ptr
        theirs: list[Any] = [buckets[key].params[i].grad for key, i in taken]
        ours: list[Any] = [buckets[key].grads.get(i) for key, i in taken]
        if (
            {torch.Tensor}.issuperset(map(type, chain(theirs, ours)))
            and {torch.strided}.issuperset(map(attrgetter("layout"), theirs))
            and all(map(operator.eq, map(address, theirs), map(address, ours)))
        ):
            return set(taken)
        return {(key, i) for key, i in taken if lies_in_bucket(buckets[key], i)}

    def _settle_down(self, place: ParamId) -> None:
        """Restores the tensor of `p.grad`, or adopts a sum that autograd has made."""
        key, i = place
        bucket, record = self.buckets[key], self.records[place]
        param, before = bucket.params[i], record.before
        gradient, memory = param.grad, bucket.grads.get(i)
        if gradient is None or memory is None:  # a hook took it; or it was frozen since
            return
        if lies_in_bucket(bucket, i):
            if before is not None:
                param.grad = before
            return
        mine = compat.local(gradient)
        fits = type(mine) is torch.Tensor and mine.dtype == memory.dtype
        if not (fits and record.first and gradient.layout is torch.strided):
            return
        if compat.storage_users(mine) == compat.storage_users(memory) == 1:
            with torch.no_grad():
                memory.copy_(mine)
            param.grad = compat.like(param, memory.detach())

    def _lazy(self, in_place: set[ParamId]) -> set[int]:
        """The buckets whose gradients may still be on their way when `backward()` returns: each is
        what autograd was given, and was not looked at."""
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

    def _norms(self, norms: Norms, k: int) -> tuple[float, ...]:
        """The L2 norm and the largest absolute value of a gradient, over all ranks."""
        return norms.get(k) if self.totals is None else self.totals.get(norms, k)

    def _serve(self, quiet: set[ParamId], lazy: set[int]) -> None:
        """Guards gradients whose norms were taken on the device: they answer with them."""
        if self.totals is not None:
            others = [r.norms for r in self.records.values() if r.norms is not None]
            self.totals.expect([*self.norms.values(), *others])
        for key, norms in self.norms.items():
            bucket = self.buckets[key]
            copied = self.copies[key] if key in lazy else None
            for k, i in enumerate(norms.indices):
                gradient = bucket.params[i].grad
                if (key, i) not in quiet or gradient is None or guard_of(gradient) is not None:
                    continue
                mine = compat.local(gradient)
                if type(mine) is not torch.Tensor:
                    continue
                if key in lazy or compat.storage_users(mine) <= 2:  # else another name changes it
                    name, of_it = bucket.layout.params[i].name, partial(self._norms, norms, k)
                    make_lazy(gradient, name, of_it, bucket.pending, copied)

    def _fold(self, quiet: Iterable[ParamId]) -> None:
        """Guards the gradients that stay on the device: they note a factor from now on."""
        resident = [bucket for bucket in self.buckets.values() if bucket.resident is not None]
        size_bytes = sum(bucket.layout.size_bytes for bucket in resident)
        if size_bytes < LEAST_FOLDED * sum(len(bucket.params) for bucket in resident):
            return
        for key, i in quiet:
            bucket = self.buckets[key]
            gradient = bucket.params[i].grad
            if bucket.resident is None or type(gradient) is not torch.Tensor:
                continue
            if not is_shared(gradient):  # who held another name for it would read it unscaled
                fold(gradient, bucket.layout.params[i].name, bucket.pending)


def lies_in_bucket(bucket: HostBucket, index: int) -> bool:
    """True if a parameter's `p.grad` is in its place in its bucket."""
    gradient, memory = bucket.params[index].grad, bucket.grads.get(index)
    return gradient is not None and memory is not None and same_memory(gradient, memory)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two tensors of one shape begin at the same place? Empty ones are nowhere."""
    a = compat.local(a)
    return a.layout is torch.strided and (a.data_ptr() == b.data_ptr() or not a.numel())
