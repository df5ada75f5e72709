"""Implements the ops that free memory."""

from __future__ import annotations

from typing import Any

import torch

from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.group import OpGroup, nothing
from megacompile.runtime.updates.device_buffers import Deferred, WriteBack


class LifetimeOps(OpGroup):
    """`megacompile.ir.ops.stage_ops` on a machine."""

    def wait(self, *handles: Handle) -> None:
        self._issue(Stream.COMPUTE, handles, nothing)

    def defer_free(self, value: Handle, *, after: tuple[Handle, ...] = ()) -> None:
        for handle in after:
            if handle.event is None:  # the CPU, or a thread that holds its tensors
                continue
            owner = torch.cuda.current_stream(self.machine.device)
            deferred = Deferred(value.value, handle.event, owner)
            write = handle.value
            if isinstance(write, WriteBack) and isinstance(value.value, dict):  # else: its norms
                write.stays(value.value)
                deferred = Deferred(value.value, handle.event, owner, write.work.fresh.clear)
            self.machine.deferred.add(deferred)

    def drain(self) -> Handle:
        machine = self.machine
        deferred = machine.deferred.take()
        machine.device_update.wait_for_copies()
        copies = tuple(Handle(None, Stream.D2H, entry.copied) for entry in deferred)
        taken = tuple(handle for _, handle in machine.alive)  # prefetches from it

        def drop() -> None:
            for entry in deferred:  # the owner uses it next, maybe on another current stream
                entry.owner.wait_event(entry.copied)
                entry.forget()
            deferred.clear()
            machine.alive.clear()

        return self._issue(Stream.COMPUTE, (*copies, *taken), drop)

    def free(self, value: Handle, *, after: tuple[Any, ...] = ()) -> None:
        raise AssertionError("free is printed as del")
