"""Carries out the ops that bring optimizer states from a disk to host memory, and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from megacompile.ir.buckets import Bucket
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.disk.transfers import Request
from megacompile.runtime.ops.group import OpGroup, handles


class DiskOps(OpGroup):
    """`megacompile.ir.ops.disk` on a machine, in a backward and in an update."""

    def read_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging = self.machine.staging
        if staging is None or (self.in_step and bucket.key not in self.parts):
            return Handle(None, Stream.READ)
        host = self.machine.buckets[bucket.key]
        for handle in handles(after):  # of the step before: mostly it is over
            if handle.host is not None:
                handle.host.settle()
        staged = staging.read(host, f"{bucket.label}READ_STATE of {host.layout.name!r}")
        if staged is not None and staged.read is not None:
            self._note(staged.read)
        return Handle(staged, Stream.READ, host=staged)

    def write_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        staging, host = self.machine.staging, self.machine.buckets[bucket.key]
        staged = None if staging is None else staging.of(host)
        if staging is None or staged is None:
            return Handle(None, Stream.WRITE)
        written = staged.written  # with the update of the host, which it is behind
        if written is None:
            events = [handle.event for handle in handles(after) if handle.event is not None]
            what = f"{bucket.label}WRITE_STATE of {host.layout.name!r}"
            first = host.pending.in_flight
            written = staging.write(staged, what, first, functools.partial(_await, events))
            updates = self.machine.in_backward
            visible = [] if updates is None else updates.visible(host)
            host.pending.go_on(written, (), visible)
        self._note(written.request)
        written.request.begin()
        return Handle(None, Stream.WRITE, host=host.pending)

    def _note(self, request: Request) -> None:
        """Let a trace have its times."""
        if self.recording is not None:
            note, lane = self.recording.noted_later(), request.way.value
            request.when_done(lambda: note(lane, request.began_s, request.ended_s))


def _await(events: Sequence[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()
