"""Implements the ops that provide a bucket's weights."""

from __future__ import annotations

from typing import Any

import torch

from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Completion
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.group import OpGroup, handles, nothing
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.updates.leases import BucketLease
from megacompile.runtime.updates.parameter import flat


class WeightOps(OpGroup):
    """`megacompile.ir.ops.bucket_ops` on a machine."""

    def begin(self) -> Handle:
        return self._issue(Stream.COMPUTE, (), nothing)

    def prefetch(self, bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Handle:
        slots, host = self.machine.slots, self.machine.buckets[bucket.key]
        if host.on_disk is not None:
            return self._from_disk(host, bucket, slot, after)
        work = host.pending.in_flight
        if work is not None and len(work.fresh) == len(host.values):  # they are on the device
            fresh = dict(work.fresh)

            def move() -> Any:
                weights = slots.weights(slot, bucket)
                for i, new in fresh.items():
                    flat(weights[i]).copy_(new, non_blocking=True)
                return weights

            # The update ran on the compute stream, and every prefetch waits for `begin` or a later
            # op of that stream. The token is only for the copy to the host.
            others = tuple(handle for handle in handles(after) if handle.value is not work)
            moved = self._issue(Stream.H2D, others, move)
            self.machine.alive.append((fresh, moved))
            return moved

        def copy() -> Any:
            slots.flat(slot, bucket).copy_(host.flat, non_blocking=True)
            return slots.weights(slot, bucket)

        return self._issue(Stream.H2D, (after,), copy)

    def _from_disk(
        self, host: HostBucket, bucket: Bucket, slot: Slot, after: tuple[Any, ...]
    ) -> Handle:
        """Copy from the buffer that its `read_weights` has filled; the buffer is free after the
        copy."""
        machine = self.machine
        taken = next((h.value for h in handles(after) if isinstance(h.value, BucketLease)), None)

        def copy() -> Any:
            size, flat = bucket.size_bytes, host.flat if taken is None else taken.place()
            machine.slots.flat(slot, bucket).copy_(flat[:size], non_blocking=True)
            if taken is not None:
                cuda = machine.device.type == "cuda"
                copied = torch.cuda.current_stream(machine.device).record_event() if cuda else None
                taken.release(Completion(copied) if cuda else None)
            return machine.slots.weights(slot, bucket)

        return self._issue(Stream.H2D, (after,), copy)

    def reuse(self, bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Handle:
        slots = self.machine.slots
        return self._issue(Stream.COMPUTE, (after,), lambda: slots.weights(slot, bucket))

    def resident(self, bucket: Bucket) -> Handle:
        host = self.machine.buckets[bucket.key]
        return self._issue(Stream.COMPUTE, (), lambda: host.streamed)
