"""Carries out the ops on saved tensors that wait on the host between a forward and its backward."""

from __future__ import annotations

from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.group import OpGroup


class SavedTensorOps(OpGroup):
    """`megacompile.ir.ops.saved_tensors` on a machine."""

    def offload_saved(self, stage: Stage, value: Handle) -> Handle:
        del stage
        pool, queue = self.machine.activations, self.machine.streams.copies(Stream.D2H)
        return self._issue(Stream.D2H, (value,), lambda: pool.store(value.value, queue))

    def alloc_saved(self, stage: Stage, on_host: Handle) -> Handle:
        del stage
        return self._issue(Stream.COMPUTE, (), lambda: on_host.value.empty())

    def fetch_saved(self, stage: Stage, on_host: Handle, buffer: Handle) -> Handle:
        del stage
        copy, queue = on_host.value, self.machine.streams.copies(Stream.H2D)
        offloaded = Handle(None, Stream.D2H, copy.ready)  # in the forward, which is another graph
        return self._issue(
            Stream.H2D, (buffer, offloaded), lambda: copy.copy_to(buffer.value, queue)
        )
