"""Implements the ops of `optimizer.step()` on buckets that stay in place."""

from __future__ import annotations

from typing import Any

from megacompile import log
from megacompile.ir.buckets import Bucket
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.group import OpGroup, handles
from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates.update import update_residents


class UpdateOps(OpGroup):
    """`megacompile.ir.ops.bucket_ops` on a machine."""

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
                work = staging.write_states(states, what, work, made.wait)
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
        machine = self.machine
        host, updates, run = machine.buckets[bucket.key], machine.in_backward, machine.current_run()
        assert updates is not None, "a schedule with updates, and no optimizer"

        def step() -> None:
            _, group = gradients.value
            if norms is not None:
                taken = run.update_norms(bucket.key, self.gradient_params[bucket.key])
                taken.keep(norms.value, norms.event)
            updates.update_in_place(host, group)

        waits = (gradients, after) if norms is None else (gradients, norms, after)
        return self._issue(Stream.COMPUTE, waits, step)

    def help_host(self, updates: tuple[Handle, ...]) -> Handle:
        made = [handle.value for handle in updates if isinstance(handle.value, InFlight)]
        self.machine.host_updates.help(made)
        log.logger("update").debug("the device helps with %d updates", len(made))
        return Handle(None, Stream.DEVICE)
