"""Carries out the ops on saved tensors that wait on the host, or on a disk, between a forward and
its backward."""

from __future__ import annotations

from typing import Any

from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.runtime.device.activations import OnHost
from megacompile.runtime.device.saved_on_disk import OnDisk, ReadBack
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.group import OpGroup, handles


class SavedTensorOps(OpGroup):
    """`megacompile.ir.ops.saved_tensors` on a machine."""

    def offload_saved(self, stage: Stage, value: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        del stage
        pool, queue = self.machine.activations, self.machine.streams.copies(Stream.D2H)
        return self._issue(Stream.D2H, (value, *after), lambda: pool.store(value.value, queue))

    def write_saved(self, stage: Stage, on_host: Handle) -> Handle:
        store = self.machine.saved_disk
        assert store is not None, "a schedule with a disk, on a machine without"
        saved = OnDisk(store, f"{stage.index}WRITE_SAVED of {stage.name!r}")

        def begin() -> None:
            self._note(saved.write(on_host.value))

        return self.machine.streams.hand(Stream.WRITE, (on_host,), saved, begin)

    def read_saved(self, stage: Stage, on_disk: Handle, *, after: tuple[Any, ...] = ()) -> Handle:
        saved = on_disk.value
        if isinstance(saved, OnHost) or saved.kept is not None:  # it is there, and stays
            return Handle(saved.to_host(), Stream.READ)
        back = ReadBack(saved, f"{stage.index}READ_SAVED of {stage.name!r}")

        def begin() -> None:
            self._note(back.begin())

        return self.machine.streams.hand(Stream.READ, tuple(handles(after)), back, begin)

    def alloc_saved(self, stage: Stage, on_host: Handle) -> Handle:
        del stage
        return self._issue(Stream.COMPUTE, (), lambda: on_host.value.empty())

    def fetch_saved(self, stage: Stage, on_host: Handle, buffer: Handle) -> Handle:
        del stage
        copy, queue = on_host.value, self.machine.streams.copies(Stream.H2D)
        offloaded = Handle(None, Stream.D2H, copy.ready)  # in the forward, which is another graph
        waits = (buffer, on_host, offloaded)
        return self._issue(Stream.H2D, waits, lambda: copy.copy_to(buffer.value, queue))
