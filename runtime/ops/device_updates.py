"""Implements the ops of optimizer updates on the device, for streamed buckets."""

from __future__ import annotations

from typing import Any

import torch

from megacompile.ir.buckets import Bucket
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.group import OpGroup
from megacompile.runtime.updates import device_buffers
from megacompile.runtime.updates.device_buffers import UpdateBuffers, WriteBack, untimed
from megacompile.runtime.updates.in_backward import InBackward
from megacompile.runtime.updates.parameter import ParamUpdate


class DeviceUpdateOps(OpGroup):
    """`megacompile.ir.ops.bucket_ops` on a machine, in a backward and in an update."""

    def alloc_state(self, bucket: Bucket, masters: bool) -> Handle:
        machine, trained = self.machine, self.gradient_params[bucket.key]
        host = machine.buckets[bucket.key]

        def allocate() -> UpdateBuffers:
            if machine.in_backward is None:
                return machine.device_update.alloc(host, trained, masters=masters)
            return machine.in_backward.alloc(host, machine.device, masters=masters)

        return self._issue(Stream.COMPUTE, (), allocate)

    def fetch_state(
        self, bucket: Bucket, buffer: Handle, masters: bool, *, after: tuple[Any, ...] = ()
    ) -> Handle:
        host = self.machine.buckets[bucket.key]
        source = self.machine.in_backward or self.machine.device_update
        return self._issue(
            Stream.H2D, (buffer, after), lambda: source.fetch(host, buffer.value, masters=masters)
        )

    def update(
        self, bucket: Bucket, weights: Handle | None, gradients: Handle, state: Handle
    ) -> Handle:
        host = self.machine.buckets[bucket.key]
        steps = self._steps(bucket)
        if steps is None:
            return Handle(None, Stream.COMPUTE)

        def step() -> UpdateBuffers:
            _, group = gradients.value
            given = None if weights is None else weights.value
            if given is not None and self.machine.ranks is not None:
                given = self.machine.ranks.own(bucket, given)
            buffers: UpdateBuffers = state.value
            with torch.no_grad():
                device_buffers.update(host, buffers, steps, group, given)
            return buffers

        waits = (gradients, state) if weights is None else (weights, gradients, state)
        return self._issue(Stream.COMPUTE, waits, step)

    def _steps(self, bucket: Bucket) -> dict[int, ParamUpdate] | None:
        """The update work for a bucket's parameters; None: nothing in this step."""
        if self.in_step:
            part = self.parts.get(bucket.key)
            return None if part is None else {step.index: step for step in part.steps}
        return self._in_backward.running[bucket.key]

    def offload_state(self, bucket: Bucket, updated: Handle, norms: Handle | None = None) -> Handle:
        if self.in_step:
            return self._bring_back(bucket, updated)
        host, run = self.machine.buckets[bucket.key], self.machine.current_run()
        cuda = self.machine.device.type == "cuda"

        def copy() -> WriteBack | None:
            queue = torch.cuda.current_stream(self.machine.device) if cuda else None
            if norms is not None:  # first, so that a loop that logs them waits only for them
                taken = run.update_norms(bucket.key, self.gradient_params[bucket.key])
                taken.fill(norms.value, queue)
            return self._in_backward.offload(host, updated.value, queue)

        return self._issue(Stream.D2H, (updated,) if norms is None else (updated, norms), copy)

    def _bring_back(self, bucket: Bucket, updated: Handle) -> Handle:
        """Copy in chunks, by a thread: see [Note: small chunks] in `updates.device_buffers`."""
        machine, part = self.machine, self.parts.get(bucket.key)
        if part is None:
            return Handle(None, Stream.HOST)
        assert part.left is not None
        left = part.left
        timed = untimed if self.recording is None else self.recording.in_background()
        flying = left.bring_back(updated.event, machine.copies, timed)
        part.left = None
        if flying is None:
            return Handle(None, Stream.HOST)
        machine.device_update.flying.append(left.host)
        return Handle(flying, Stream.HOST, host=left.host.pending)

    @property
    def _in_backward(self) -> InBackward:
        updates = self.machine.in_backward
        assert updates is not None, "a schedule with updates, and no optimizer"
        return updates
