"""Implements the ops that copy states and parameters between a disk and host memory, and saved
tensors to the host or a disk between a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import OVER, Completion
from megacompile.runtime.device.saved import OnDisk, OnHost, empty
from megacompile.runtime.device.streams import Handle, wait_for_host
from megacompile.runtime.disk.transfers import Request
from megacompile.runtime.ops.machine import OpGroup, handles
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.updates.leases import BucketLease
from megacompile.runtime.updates.staging import Staging


class DiskOps(OpGroup):
    """The ops that read, write and offload."""

    @property
    def _staging(self) -> Staging:
        staging = self.machine.staging
        assert staging is not None, "a schedule with a disk, on a machine without"
        return staging

    def read_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        if self.in_step and bucket.key not in self.parts:
            return Handle(None, Stream.READ)
        host = self.machine.buckets[bucket.key]
        wait_for_host(handles(after))  # of the previous step: usually finished
        what = f"{bucket.label}READ_STATE of {host.layout.name!r}"
        return self._lent(self._staging.read_states(host, what), ())

    def write_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging, host = self._staging, self.machine.buckets[bucket.key]
        staged = staging.states.of(host)
        if staged is None:
            return Handle(None, Stream.WRITE)
        if staged.write is None:  # else it is the host's update, and in flight with it
            what = f"{bucket.label}WRITE_STATE of {host.layout.name!r}"
            before = _after(handle.event for handle in handles(after))
            written = staging.write_states(staged, what, host.pending.in_flight, before)
            updates = self.machine.in_backward
            params = [] if updates is None else list(updates.running[bucket.key])
            visible = [] if updates is None else updates.visible(host)
            host.pending.go_on(written, params, visible)
        return self._write(host, staged)

    def read_weights(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        host = self.machine.buckets[bucket.key]
        what = f"{bucket.label}READ_WEIGHTS of {host.layout.name!r}"
        return self._lent(self._staging.read(host, None, handles(after), what), after)

    def read_trained(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        part = self.parts.get(bucket.key)
        if part is None:
            return Handle(None, Stream.READ)
        host, waits = part.bucket, handles(after)
        what = f"{bucket.label}READ_TRAINED of {host.layout.name!r}"
        return self._lent(self._staging.read(host, part.indices, waits, what), after)

    def _lent(self, lease: BucketLease | None, after: tuple[Any, ...]) -> Handle:
        if lease is None:  # it is in memory: its consumer waits for this op, not for the write
            wait_for_host(handles(after))
        elif lease.read is not None:
            self._note(lease.read)
        return Handle(lease, Stream.READ, host=lease)

    def write_weights(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging, host = self._staging, self.machine.buckets[bucket.key]
        lease = staging.updates.of(host)
        if lease is None:
            return Handle(None, Stream.WRITE)
        if lease.write is None:  # else it is the host's update, and in flight with it
            updates = self.machine.in_backward
            assert updates is not None, "new parameters, and no update"
            first = host.pending.in_flight
            end = None if first is None else first.last_write(Part.WEIGHTS)
            there = None if end is None else end.event  # before states
            ends = [handle.event for handle in handles(after)] if there is None else [there]
            params = list(updates.running[bucket.key])
            what = f"{bucket.label}WRITE_WEIGHTS of {host.layout.name!r}"
            written = staging.write(lease, params, what, first, _after(ends))
            host.pending.go_on(written, params, ())
        return self._write(host, lease)

    def _write(self, host: HostBucket, lease: BucketLease) -> Handle:
        request = lease.write
        assert request is not None
        self._note(request)
        request.begin()
        return Handle(None, Stream.WRITE, host=host.pending)

    def offload_saved(self, stage: Stage, value: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        del stage
        pool, queue = self.machine.activations, self.machine.streams.copies(Stream.D2H)
        return self._issue(Stream.D2H, (value, *after), lambda: OnHost.of(pool, value.value, queue))

    def write_saved(self, stage: Stage, on_host: Handle) -> Handle:
        store = self.machine.saved_disk
        assert store is not None, "a schedule with a disk, on a machine without"

        def begin() -> tuple[OnDisk | OnHost, Completion]:
            if not store.ours:
                return on_host.value, OVER
            saved = OnDisk(store, on_host.value, f"{stage.index}WRITE_SAVED of {stage.name!r}")
            self._note(saved.written)
            return saved, saved.written

        return self.machine.streams.hand(Stream.WRITE, (on_host,), begin)

    def read_saved(self, stage: Stage, on_disk: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        saved = on_disk.value
        if isinstance(saved, OnHost):  # already in host memory
            return Handle(saved, Stream.READ)

        def begin() -> tuple[OnHost, Completion]:
            back = saved.read(f"{stage.index}READ_SAVED of {stage.name!r}")
            end = back.lease.ready
            if isinstance(end, Request):
                self._note(end)
            return back, end

        return self.machine.streams.hand(Stream.READ, tuple(handles(after)), begin)

    def alloc_saved(self, stage: Stage, on_host: Handle) -> Handle:
        del stage
        return self._issue(Stream.COMPUTE, (), lambda: empty(on_host.value.meta))

    def fetch_saved(self, stage: Stage, on_host: Handle, buffer: Handle) -> Handle:
        del stage
        queue = self.machine.streams.copies(Stream.H2D)
        return self._issue(
            Stream.H2D, (buffer, on_host), lambda: on_host.value.copy_to(buffer.value, queue)
        )


def _after(events: Iterable[torch.cuda.Event | None]) -> Callable[[], None]:
    """A function for a thread, which waits for these events."""
    waits = [event for event in events if event is not None]

    def wait() -> None:
        for event in waits:
            event.synchronize()

    return wait
