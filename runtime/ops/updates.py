"""Implements the ops of optimizer updates: of buckets in place, and of streamed buckets on the
device, in a backward and in `optimizer.step()`."""

from __future__ import annotations

from typing import Any

import torch

from megacompile import log
from megacompile.ir.buckets import Bucket
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.machine import OpGroup, handles
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates import parameter
from megacompile.runtime.updates.in_backward import InBackward
from megacompile.runtime.updates.parameter import (
    ParamUpdate,
    Sources,
    UpdateBuffers,
    WriteBack,
    make_buffers,
    untimed,
)
from megacompile.runtime.updates.update import update_residents


class UpdateOps(OpGroup):
    """The ops of optimizer updates."""

    def update_host(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        part = self.parts.get(bucket.key)
        if part is None:
            return Handle(None, Stream.HOST)
        events = [handle.event for handle in handles(after) if handle.event is not None]
        staging, updates = self.machine.staging, self.machine.host_updates
        if staging is None:
            made = updates.start(part, events, self.recording)
            return Handle(made, Stream.HOST, host=part.bucket.pending)
        host = part.bucket
        states, weights = staging.states.of(host), staging.updates.of(host)

        def written(made: InFlight) -> InFlight:
            """Build an update whose results are then written to a disk."""
            work, name = made, host.layout.name
            if weights is not None:
                what = f"{bucket.label}WRITE_WEIGHTS of {name!r}"
                work = staging.write(weights, part.indices, what, work, made.wait)
            if states is not None:
                what = f"{bucket.label}WRITE_STATE of {name!r}"
                work = staging.write(states, None, what, work, made.wait)
            return work

        staged = [each for each in (states, weights) if each is not None]
        made = updates.start(part, events, self.recording, written, staged)
        return Handle(made, Stream.HOST, host=host.pending)

    def update_resident(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        """The last such op of a graph updates the buckets of all of them in one launch. No op in
        between reads them: the compute stream is in order."""
        part = self.parts.get(bucket.key)
        if part is None:
            return Handle(None, Stream.COMPUTE)
        self.residents.append((part, after))
        if len(self.residents) < self.resident_parts:
            return Handle(None, Stream.COMPUTE)
        parts = [part for part, _ in self.residents]
        waits = tuple(each for _, each in self.residents)
        self.residents = []
        handle = self._issue(Stream.COMPUTE, waits, lambda: update_residents(parts))
        for part in parts:
            part.bucket.note_changes(part.indices)
        return handle

    def update_in_place(
        self,
        bucket: Bucket,
        gradients: Handle,
        norms: Handle | None = None,
        *,
        after: tuple[Any, ...] = (),
    ) -> Handle:
        machine, updates = self.machine, self._in_backward
        host, run = machine.buckets[bucket.key], machine.current_run()

        def step() -> None:
            _, group = gradients.value
            if norms is not None:
                taken = run.update_norms(bucket.key, self.gradient_params[bucket.key])
                taken.keep(norms.value, norms.event)
            updates.update_in_place(host, group)

        return self._issue(Stream.COMPUTE, (gradients, norms, after), step)

    def help_host(self, updates: tuple[Handle, ...]) -> Handle:
        made = {h.value.future for h in updates if isinstance(h.value, InFlight) and h.value.future}
        self.machine.host_updates.help(made)
        log.logger("update").debug("the device helps with %d updates", len(made))
        return Handle(None, Stream.DEVICE)

    def alloc_state(self, bucket: Bucket, masters: bool) -> Handle:
        host, device = self.machine.buckets[bucket.key], self.machine.device
        return self._issue(
            Stream.COMPUTE,
            (),
            lambda: make_buffers(host, self._sources(host), device, masters=masters),
        )

    def fetch_state(
        self, bucket: Bucket, buffer: Handle, masters: bool, *, after: tuple[Any, ...] = ()
    ) -> Handle:
        host = self.machine.buckets[bucket.key]

        def fetch() -> UpdateBuffers:
            buffers: UpdateBuffers = buffer.value
            parameter.fetch(host, buffers, self._sources(host), masters=masters)
            return buffers

        return self._issue(Stream.H2D, (buffer, after), fetch)

    def _sources(self, host: HostBucket) -> Sources:
        """The states on the host for a device update; empty if they are unknown."""
        source = self.machine.in_backward or self.machine.device_update
        return source.sources(host, self.gradient_params[host.layout.key])

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
                parameter.update(host, buffers, steps, group, given)
            return buffers

        return self._issue(Stream.COMPUTE, (weights, gradients, state), step)

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
        queue = self.machine.streams.copies(Stream.D2H)

        def copy() -> WriteBack | None:
            if norms is not None:  # first, so that a loop that logs them waits only for them
                taken = run.update_norms(bucket.key, self.gradient_params[bucket.key])
                taken.fill(norms.value, queue)
            return self._in_backward.offload(host, updated.value, queue)

        return self._issue(Stream.D2H, (updated, norms), copy)

    def _bring_back(self, bucket: Bucket, updated: Handle) -> Handle:
        """Copy in chunks, by a thread: see [Note: small chunks] in `updates.on_device`."""
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
