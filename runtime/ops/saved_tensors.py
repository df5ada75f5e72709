"""Implements the ops on saved tensors that are offloaded to the host or a disk between a forward
and its backward."""

from __future__ import annotations

from typing import Any

from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Completion
from megacompile.runtime.device.saved import OnDisk, OnHost, empty
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.disk.transfers import Request
from megacompile.runtime.ops.group import OpGroup, handles


class SavedTensorOps(OpGroup):
    """`megacompile.ir.ops.stage_ops` on a machine."""

    def offload_saved(self, stage: Stage, value: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        del stage
        pool, queue = self.machine.activations, self.machine.streams.copies(Stream.D2H)
        return self._issue(Stream.D2H, (value, *after), lambda: OnHost.of(pool, value.value, queue))

    def write_saved(self, stage: Stage, on_host: Handle) -> Handle:
        store = self.machine.saved_disk
        assert store is not None, "a schedule with a disk, on a machine without"

        def begin() -> tuple[OnDisk, Completion]:
            saved = OnDisk(store, on_host.value, f"{stage.index}WRITE_SAVED of {stage.name!r}")
            self._note(saved.request)
            return saved, saved.written

        return self.machine.streams.hand(Stream.WRITE, (on_host,), begin)

    def read_saved(self, stage: Stage, on_disk: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        saved = on_disk.value
        if isinstance(saved, OnHost):  # already in host memory
            return Handle(saved, Stream.READ)

        def begin() -> tuple[OnHost, Completion]:
            back = saved.read(f"{stage.index}READ_SAVED of {stage.name!r}")
            end = back.lease.ready
            self._note(end if isinstance(end, Request) else None)
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
