"""Implements the collective ops."""

from __future__ import annotations

from typing import Any

import torch

from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.stream import Stream
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.group import Group, OpGroup, handles
from megacompile.runtime.updates.parameter import flat


class CollectiveOps(OpGroup):
    """`megacompile.ir.ops.bucket_ops` on a machine."""

    @property
    def _ranks(self) -> Ranks:
        ranks = self.machine.ranks
        assert ranks is not None, "a schedule of several ranks, and no mesh"
        return ranks

    def prefetch_shard(self, bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Handle:
        machine, ranks = self.machine, self._ranks
        host = machine.buckets[bucket.key]
        work = host.pending.in_flight
        fresh: dict[int, torch.Tensor] = {}
        if work is not None and len(work.fresh) == len(host.values):
            fresh = dict(work.fresh)  # they are on the device: see `prefetch`

        def copy() -> Any:
            places = ranks.places(bucket, machine.slots.flat(slot, bucket))
            for i, place in enumerate(places):
                if place.numel():
                    value = fresh.get(i, host.streamed[i])
                    place.view(value.dtype).copy_(flat(value), non_blocking=True)
            return machine.slots.weights(slot, bucket)

        waits = handles(after)
        if fresh:  # the token of the copy to the host is not needed
            waits = [handle for handle in waits if handle.value is not work]
        copied = self._issue(Stream.H2D, tuple(waits), copy)
        if fresh:
            machine.alive.append((fresh, copied))
        return copied

    def all_gather(self, bucket: Bucket, slot: Slot, shard: Handle) -> Handle:
        slots, ranks = self.machine.slots, self._ranks

        def gather() -> Any:
            ranks.gather(bucket, slots.flat(slot, bucket))
            return slots.weights(slot, bucket)

        return self._issue(Stream.COMM, (shard,), gather)

    def alloc_shard(self, bucket: Bucket) -> Handle:
        machine, ranks = self.machine, self._ranks
        host = machine.buckets[bucket.key]

        def allocate() -> tuple[int, Group]:
            parts = {}
            for i in self.gradient_params[bucket.key]:
                numel = bucket.params[i].shard_numel(ranks.count)
                dtype = bucket.params[i].dtype if host.grad_dtype is None else host.grad_dtype
                parts[i] = torch.empty(numel, dtype=dtype, device=machine.device)
            return bucket.key, parts

        return self._issue(Stream.COMPUTE, (), allocate)

    def reduce_scatter(self, bucket: Bucket, gradients: Handle, buffer: Handle) -> Handle:
        host, ranks = self.machine.buckets[bucket.key], self._ranks

        def average() -> tuple[int, Group]:
            key, group = gradients.value
            _, parts = buffer.value
            ranks.average(group, parts)
            rows = {
                i: part[: host.values[i].numel()].view(host.values[i].shape)
                for i, part in parts.items()
            }
            return key, rows

        return self._issue(Stream.COMM, (gradients, buffer), average)

    def all_reduce(self, bucket: Bucket, gradients: Handle) -> Handle:
        ranks = self._ranks

        def average() -> tuple[int, Group]:
            key, group = gradients.value
            ranks.average_replicas([flat(part) for part in group.values()])
            return key, group

        return self._issue(Stream.COMM, (gradients,), average)
