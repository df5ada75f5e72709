"""Implements the ops that copy: weights to the device, gradients to the host, both between ranks,
states and parameters between a disk and host memory, and saved tensors to the host or a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from megacompile import compat
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.ops import Part
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Completion, nothing
from megacompile.runtime.device.pool import OnDisk, OnHost, completion_of, empty
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.disk import Request
from megacompile.runtime.ops.machine import Group, OpGroup, handles
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.updates.staging import BucketLease
from megacompile.runtime.updates.update import flat


class StreamingOps(OpGroup):
    """The ops on weights and gradients of buckets, on saved tensors, and on data on a disk."""

    def begin(self) -> Handle:
        return self._issue(Stream.COMPUTE, (), nothing)

    def prefetch(self, bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Handle:
        slots, host = self.machine.slots, self.machine.buckets[bucket.key]
        if host.on_disk is not None:
            return self._from_disk(bucket, slot, after)

        def copy(fresh: Group) -> Any:
            if fresh:
                weights = slots.weights(slot, bucket)
                for i, new in fresh.items():
                    flat(weights[i]).copy_(new, non_blocking=True)
                return weights
            slots.flat(slot, bucket).copy_(host.flat, non_blocking=True)
            return slots.weights(slot, bucket)

        return self._copied(host, after, copy)

    def prefetch_shard(self, bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Handle:
        slots, ranks = self.machine.slots, self._ranks
        host = self.machine.buckets[bucket.key]

        def copy(fresh: Group) -> Any:
            for i, place in enumerate(ranks.places(bucket, slots.flat(slot, bucket))):
                if place.numel():
                    value = fresh.get(i, host.streamed[i])
                    place.view(value.dtype).copy_(flat(value), non_blocking=True)
            return slots.weights(slot, bucket)

        return self._copied(host, after, copy)

    def _copied(
        self, host: HostBucket, after: tuple[Any, ...], copy: Callable[[Group], Any]
    ) -> Handle:
        """Copy a bucket into a slot, from the device if its update left all new values there."""
        fresh: Group = {}
        work, waits = host.pending.in_flight, handles(after)
        if work is not None and len(work.fresh) == len(host.values):
            fresh = dict(work.fresh)
            # The update ran on the compute stream, and every prefetch waits for `begin` or a later
            # op of that stream, so it needs no token, which stands for the copy to the host.
            waits = [handle for handle in waits if handle.value is not work]
        copied = self._issue(Stream.H2D, waits, partial(copy, fresh))
        if fresh:
            self.machine.alive.append((fresh, copied))
        return copied

    def _from_disk(self, bucket: Bucket, slot: Slot, after: tuple[Any, ...]) -> Handle:
        """Copy from the buffer that its `read_weights` has filled, and release that."""
        machine, queue = self.machine, self.machine.streams.copies(Stream.H2D)
        taken = next(h.value for h in handles(after) if isinstance(h.value, BucketLease))

        def copy() -> Any:
            place = taken.place()[: bucket.size_bytes]
            machine.slots.flat(slot, bucket).copy_(place, non_blocking=True)
            taken.release(completion_of(queue))
            return machine.slots.weights(slot, bucket)

        return self._issue(Stream.H2D, (after,), copy)

    def all_gather(self, bucket: Bucket, slot: Slot, shard: Handle) -> Handle:
        slots, ranks = self.machine.slots, self._ranks

        def gather() -> Any:
            ranks.gather(bucket, slots.flat(slot, bucket))
            return slots.weights(slot, bucket)

        return self._issue(Stream.COMM, (shard,), gather)

    def reuse(self, bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Handle:
        weights = partial(self.machine.slots.weights, slot, bucket)
        return self._issue(Stream.COMPUTE, (after,), weights)

    def resident(self, bucket: Bucket) -> Handle:
        host = self.machine.buckets[bucket.key]
        return self._issue(Stream.COMPUTE, (), lambda: host.streamed)

    def alloc_grad(self, bucket: Bucket) -> Handle:
        device = self.machine.device

        def allocate() -> tuple[int, Group]:
            host = self.machine.buckets[bucket.key]
            buffer = {
                i: torch.empty_like(host.values[i], dtype=host.grad_dtype, device=device)
                for i in self.gradient_params[bucket.key]
            }
            return bucket.key, buffer

        return self._issue(Stream.COMPUTE, (), allocate)

    def fetch_grad(self, bucket: Bucket, buffer: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        run = self.machine.run
        sources = {i: run.so_far(bucket.key, i) for i in self.gradient_params[bucket.key]}

        def copy() -> tuple[int, Group]:
            key, group = buffer.value
            for i, tensor in group.items():
                source = sources[i]
                if source is None:
                    tensor.zero_()
                else:
                    tensor.copy_(source, non_blocking=True)
            return key, group

        return self._issue(Stream.H2D, (buffer, after), copy)

    def add_grad(self, bucket: Bucket, so_far: Handle, gradients: Handle) -> Handle:
        def add() -> tuple[int, Group]:
            key, total = so_far.value
            _, new = gradients.value
            for i, gradient in new.items():
                total[i].add_(gradient)
            return key, total

        return self._issue(Stream.COMPUTE, (so_far, gradients), add)

    def norm_grad(self, bucket: Bucket, gradients: Handle, largest: bool = True) -> Handle:
        kinds = (2, torch.inf) if largest else (2,)

        def norms() -> torch.Tensor:
            _, group = gradients.value
            tensors = [group[i] for i in self.gradient_params[bucket.key]]
            # a rank may have no rows of a parameter, and an empty tensor has no maximum
            tensors = [each if each.numel() else each.new_zeros(1) for each in tensors]
            orders = (compat.FOREACH_NORM(tensors, k, torch.float32) for k in kinds)
            return torch.stack([torch.stack(found) for found in orders])

        handle = self._issue(Stream.COMPUTE, (gradients,), norms)
        self.machine.streams.mark(handle)  # readers wait
        return handle

    def keep_grad(self, bucket: Bucket, gradients: Handle) -> Handle:
        run = self.machine.run

        def keep() -> None:
            run.keep(*gradients.value)

        handle = self._issue(Stream.COMPUTE, (gradients,), keep)
        self.machine.streams.mark(handle)  # a later graph may fetch and accumulate them
        self.machine.buckets[bucket.key].pending.gradients_copied = handle.event
        return handle

    def offload_grad(
        self,
        bucket: Bucket,
        gradients: Handle,
        norms: Handle | None = None,
        *,
        after: tuple[Any, ...] = (),
    ) -> Handle:
        run, queue = self.machine.run, self.machine.streams.copies(Stream.D2H)
        indices = self.gradient_params[bucket.key]
        memory = run.destinations(bucket.key, indices)

        def copy() -> None:
            key, group = gradients.value
            # first, so that clip_grad_norm_ waits only for them
            if norms is not None and len(memory) == len(indices):
                run.norms(key, indices).fill(norms.value, queue)
            for i, there in memory.items():
                there.copy_(group[i], non_blocking=True)

        handle = self._issue(Stream.D2H, (gradients, norms, after), copy)
        self.machine.buckets[bucket.key].pending.gradients_copied = handle.event
        if memory:
            run.copied(bucket.key, handle.event)
        return handle

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

    # Data on a disk, and saved tensors on the host.

    def read_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        if self.in_step and bucket.key not in self.parts:
            return Handle(None, Stream.READ)
        # the write in `after` is over: `Updates.prepare_step` and `InBackward.begin` have waited
        host = self.machine.buckets[bucket.key]
        what = f"{bucket.label}READ_STATE of {host.layout.name!r}"
        lease = self._staging.read_states(host, what)
        if lease is not None:
            self._note(lease.read)
        return Handle(lease, Stream.READ, host=lease)

    def write_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        return self._write(bucket, after, weights=False)

    def write_weights(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        return self._write(bucket, after, weights=True)

    def _write(self, bucket: Bucket, after: tuple[Any, ...], *, weights: bool) -> Handle:
        """Begin a write of new values, which `update_host` makes for updates on the host."""
        staging, host = self._staging, self.machine.buckets[bucket.key]
        lease = (staging.updates if weights else staging.states).of(host)
        if lease is None:
            return Handle(None, Stream.WRITE)
        if lease.write is None:
            params, first = list(self._in_backward.running[bucket.key]), host.pending.in_flight
            visible = [] if weights else self._in_backward.visible(host)
            ends = [handle.event for handle in handles(after)]
            if weights and first is not None:
                end = first.last_write(Part.WEIGHTS)
                if end is not None and end.event is not None:  # weights are copied before states
                    ends = [end.event]
            kind = "WRITE_WEIGHTS" if weights else "WRITE_STATE"
            what, before = f"{bucket.label}{kind} of {host.layout.name!r}", partial(_await, ends)
            written = staging.write(lease, params if weights else None, what, first, before)
            host.pending.start(written, params, visible)
        request = lease.write
        assert request is not None
        self._note(request)
        request.begin()
        return Handle(None, Stream.WRITE, host=host.pending)

    def read_weights(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        host = self.machine.buckets[bucket.key]
        return self._read(host, None, after, f"{bucket.label}READ_WEIGHTS")

    def read_trained(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        part = self.parts.get(bucket.key)
        if part is None:
            return Handle(None, Stream.READ)
        return self._read(part.bucket, part.indices, after, f"{bucket.label}READ_TRAINED")

    def _read(
        self, host: HostBucket, params: Sequence[int] | None, after: tuple[Any, ...], what: str
    ) -> Handle:
        what = f"{what} of {host.layout.name!r}"
        lease = self._staging.read(host, params, handles(after), what)
        self._note(lease.read)
        return Handle(lease, Stream.READ, host=lease)

    def offload_saved(self, stage: Stage, value: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        pool, queue = self.machine.activations, self.machine.streams.copies(Stream.D2H)
        return self._issue(Stream.D2H, (value, *after), lambda: OnHost.of(pool, value.value, queue))

    def write_saved(self, stage: Stage, on_host: Handle) -> Handle:
        store = self.machine.saved_disk
        assert store is not None, "a schedule with a disk, on a machine without"

        def begin() -> tuple[OnDisk, Completion]:
            saved = OnDisk(store, on_host.value, f"{stage.index}WRITE_SAVED of {stage.name!r}")
            self._note(saved.written)
            return saved, saved.written

        return self.machine.streams.hand(Stream.WRITE, (on_host,), begin)

    def read_saved(self, stage: Stage, on_disk: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        saved = on_disk.value

        def begin() -> tuple[OnHost, Completion]:
            back = saved.read(f"{stage.index}READ_SAVED of {stage.name!r}")
            assert isinstance(back.ready, Request)
            self._note(back.ready)
            return back, back.ready

        return self.machine.streams.hand(Stream.READ, tuple(handles(after)), begin)

    def alloc_saved(self, stage: Stage, on_host: Handle) -> Handle:
        return self._issue(Stream.COMPUTE, (), lambda: empty(on_host.value.meta))

    def fetch_saved(self, stage: Stage, on_host: Handle, buffer: Handle) -> Handle:
        queue = self.machine.streams.copies(Stream.H2D)
        return self._issue(
            Stream.H2D, (buffer, on_host), lambda: on_host.value.copy_to(buffer.value, queue)
        )


def _await(events: Iterable[torch.cuda.Event | None]) -> None:
    """Wait on the host, in the thread that writes."""
    for event in events:
        if event is not None:
            event.synchronize()
