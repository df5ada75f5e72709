"""One call of `backward()`: the gradients that captured graphs return to autograd, and the work at
its end.

Autograd accumulates: it adopts a bucket's gradient as `p.grad` without a copy, adds to an existing
one, and runs hooks. Copies to the host may still be in flight then. The end of `backward()` waits
for them, gives each `p.grad` its precomputed norm, and copies sums that autograd allocated
elsewhere into the bucket.
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
from megacompile.runtime.params.gradient_guards import (
    fold,
    leave_unsummed,
    make_lazy,
    note_sum,
    sum_late,
    take,
)
from megacompile.runtime.params.gradient_record import GradientRecord, Norms, Totals
from megacompile.runtime.params.guards import guard_of, is_shared
from megacompile.runtime.params.host_bucket import HostBucket

# average bytes per gradient: a GPU scales smaller ones faster than the host can guard them
LEAST_FOLDED = 4 * 2**20


class BackwardPass:
    """The gradients of one call of `backward()`; `Gradients` keeps it until the call ends.

    Args:
        folds: updates on the device multiply a bucket's gradients by a factor themselves.
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
        self.last = True  # the last backward before the step, as far as known
        self.norms: dict[int, Norms] = {}  # by bucket
        self.copies: dict[int, torch.cuda.Event | None] = {}  # by bucket: copies to the host

    def record(self, place: ParamId) -> GradientRecord:
        """The record of a parameter, created at first use."""
        found = self.records.get(place)
        if found is None:
            found = self.records[place] = GradientRecord()
        return found

    def has(self, place: ParamId) -> bool:
        """True if autograd has received a parameter's gradient."""
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
            else:  # readers run on the compute stream
                self.streams.wait_on_compute(event)

    def give_up(self) -> None:
        """Clean up after a failure: gradients taken out of `p.grad` and not accumulated are
        restored, and accumulated ones become readable."""
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
        taken: list[ParamId] = []
        updated: list[tuple[ParamId, GradientRecord]] = []
        replaced = False
        for place, record in self.records.items():
            if record.in_bucket:
                taken.append(place)
                replaced |= record.before is not None
            if record.updated:
                updated.append((place, record))
        in_place = self._in_place(taken)
        lazy = self._lazy(in_place) if self.norms else set[int]()
        if taken or not updated:
            self.await_copies(self.copies.keys() - lazy)
        for (key, i), record in updated:
            norms = record.norms
            of_it = None if norms is None else partial(self._norms, norms, norms.indices.index(i))
            take(self.buckets[key].params[i], self.buckets[key].layout.params[i].name, of_it)
        if len(in_place) < len(taken) or replaced:
            for place in sorted(taken):
                self._settle_down(place)
            in_place = self._in_place(taken)
        if self.ranks is not None and self.ranks.replicas > 1:
            self._sum(self.ranks)
        quiet = {place for place in in_place if not self.records[place].watched}
        self._serve(quiet, lazy)
        if self.folds:
            self._fold(quiet)
        # norms reference this object, not the gradients, whose memory the next ones reuse
        self.records.clear()

    def _sum(self, ranks: Ranks) -> None:
        """Record which gradients are summed over replicas. After a last backward all are: gradients
        of earlier backwards that it did not add to (of another graph) are summed here."""
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
        """The gradients among these that are in place in the buckets. Checks all of them at once
        first, because every step has many."""
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
        """Restore the tensor of `p.grad`, or adopt a sum that autograd allocated."""
        key, i = place
        bucket, record = self.buckets[key], self.records[place]
        param, before = bucket.params[i], record.before
        gradient, memory = param.grad, bucket.grads.get(i)
        if gradient is None or memory is None:  # a hook took it, or the parameter was frozen since
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

    def _norms(self, norms: Norms, k: int) -> tuple[float, ...]:
        """The L2 norm and the largest absolute value of a gradient, over all ranks."""
        return norms.get(k) if self.totals is None else self.totals.get(norms, k)

    def _serve(self, quiet: set[ParamId], lazy: set[int]) -> None:
        """Guard gradients whose norms were computed on the device; they return these norms."""
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
                if key in lazy or compat.storage_users(mine) <= 2:  # no alias changes it
                    name, of_it = bucket.layout.params[i].name, partial(self._norms, norms, k)
                    make_lazy(gradient, name, of_it, bucket.pending, copied)

    def _fold(self, quiet: Iterable[ParamId]) -> None:
        """Guard the gradients that stay on the device; they record a factor from now on."""
        resident = [bucket for bucket in self.buckets.values() if bucket.resident is not None]
        size_bytes = sum(bucket.layout.size_bytes for bucket in resident)
        if size_bytes < LEAST_FOLDED * sum(len(bucket.params) for bucket in resident):
            return
        for key, i in quiet:
            bucket = self.buckets[key]
            gradient = bucket.params[i].grad
            if bucket.resident is None or type(gradient) is not torch.Tensor:
                continue
            if not is_shared(gradient):  # an alias would read it unscaled
                fold(gradient, bucket.layout.params[i].name, bucket.pending)


def lies_in_bucket(bucket: HostBucket, index: int) -> bool:
    """True if a parameter's `p.grad` is in place in its bucket."""
    gradient, memory = bucket.params[index].grad, bucket.grads.get(index)
    return gradient is not None and memory is not None and same_memory(gradient, memory)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors of one shape have the same address; empty tensors have none."""
    a = compat.local(a)
    return a.layout is torch.strided and (a.data_ptr() == b.data_ptr() or not a.numel())
