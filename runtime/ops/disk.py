"""Implements the ops that copy states and parameters between a disk and host memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle, wait_for_host
from megacompile.runtime.ops.group import OpGroup, handles
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.updates.leases import BucketLease


class DiskOps(OpGroup):
    """`megacompile.ir.ops.bucket_ops` on a machine, in a backward and in an update."""

    def read_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging = self.machine.staging
        if staging is None or (self.in_step and bucket.key not in self.parts):
            return Handle(None, Stream.READ)
        host = self.machine.buckets[bucket.key]
        wait_for_host(handles(after))  # of the previous step: usually finished
        what = f"{bucket.label}READ_STATE of {host.layout.name!r}"
        return self._lent(staging.read_states(host, what), ())

    def write_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging, host = self.machine.staging, self.machine.buckets[bucket.key]
        staged = None if staging is None else staging.states.of(host)
        if staging is None or staged is None:
            return Handle(None, Stream.WRITE)
        if staged.write is None:  # else it is the host's update, and in flight with it
            events = [handle.event for handle in handles(after) if handle.event is not None]
            what = f"{bucket.label}WRITE_STATE of {host.layout.name!r}"
            first = host.pending.in_flight
            written = staging.write_states(staged, what, first, functools.partial(_await, events))
            updates = self.machine.in_backward
            params = [] if updates is None else list(updates.running[bucket.key])
            visible = [] if updates is None else updates.visible(host)
            host.pending.go_on(written, params, visible)
        return self._write(host, staged)

    def read_weights(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging, host = self.machine.staging, self.machine.buckets[bucket.key]
        if staging is None:
            return Handle(None, Stream.READ)
        what = f"{bucket.label}READ_WEIGHTS of {host.layout.name!r}"
        return self._lent(staging.read(host, list(handles(after)), what), after)

    def read_trained(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging, part = self.machine.staging, self.parts.get(bucket.key)
        if staging is None or part is None:
            return Handle(None, Stream.READ)
        host, params = part.bucket, part.indices
        what = f"{bucket.label}READ_TRAINED of {host.layout.name!r}"
        return self._lent(staging.read_trained(host, params, list(handles(after)), what), after)

    def _lent(self, lease: BucketLease | None, after: tuple[Any, ...]) -> Handle:
        if lease is None:  # it is in memory: its consumer waits for this op, not for the write
            wait_for_host(handles(after))
        elif lease.read is not None:
            self._note(lease.read)
        return Handle(lease, Stream.READ, host=lease)

    def write_weights(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging, host = self.machine.staging, self.machine.buckets[bucket.key]
        lease = None if staging is None else staging.updates.of(host)
        if staging is None or lease is None:
            return Handle(None, Stream.WRITE)
        if lease.write is None:  # else it is the host's update, and in flight with it
            updates = self.machine.in_backward
            assert updates is not None, "new parameters that nobody has made"
            first = host.pending.in_flight
            end = None if first is None else first.last_write(Part.WEIGHTS)
            there = None if end is None else end.event  # before states
            ends = [handle.event for handle in handles(after)] if there is None else [there]
            before = functools.partial(_await, [event for event in ends if event is not None])
            params = list(updates.running[bucket.key])
            what = f"{bucket.label}WRITE_WEIGHTS of {host.layout.name!r}"
            written = staging.write(lease, params, what, first, before)
            host.pending.go_on(written, params, ())
        return self._write(host, lease)

    def _write(self, host: HostBucket, lease: BucketLease) -> Handle:
        request = lease.write
        assert request is not None
        self._note(request)
        request.begin()
        return Handle(None, Stream.WRITE, host=host.pending)


def _await(events: Sequence[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()
