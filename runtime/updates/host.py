"""Starts updates in host memory: what `update_host` and `help_host` do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from megacompile.runtime.updates.flight import Flight
from megacompile.runtime.updates.part import BucketPart
from megacompile.runtime.updates.staging import Staged, Written
from megacompile.runtime.updates.update import BucketUpdate
from megacompile.runtime.updates.workers import Job, Workers
from megacompile.tracing.recorder import Recording


class HostUpdates:
    """The updates of host memory that go on behind `optimizer.step()`."""

    def __init__(self, device: torch.device) -> None:
        self.workers = Workers(device)

    def start(
        self,
        part: BucketPart,
        behind: Sequence[torch.cuda.Event],
        recording: Recording | None,
        written: Callable[[Flight], Written] | None = None,
        staged: Staged | None = None,
    ) -> Flight:
        """Let an update wait for a worker; whoever needs its bucket waits for it.

        Args:
            behind: what must be done before it begins: gradients on their way to the host.
            recording: of the run that it belongs to, while a trace is on.
            written: makes the write of the new states, where they lie on a disk.
            staged: those states in memory, or on their way there.
        """
        update = part.update
        bucket = update.bucket
        indices = [step.index for step in update.steps]
        job = Job(update, functools.partial(_await, behind, update, staged))
        flight = Flight(job.future, bucket.layout.name)
        try:
            if recording is not None:
                job.timed = recording.in_background()
            # the bucket knows of it before anybody can begin it
            work = flight if written is None else written(flight)
            bucket.pending.start(work, indices, part.visible)
            for i in indices:
                torch.autograd.graph.increment_version(bucket.params[i])
                bucket.copy.mark_fresh(i)
            self.workers.submit(job)
        except BaseException:
            job.call_off()
            raise
        return flight

    def help(self, flights: Sequence[Flight]) -> None:
        """Let the device make what it can of those of these that still wait, the last one first."""
        self.workers.help({flight.future for flight in flights})


def _await(events: Sequence[torch.cuda.Event], update: BucketUpdate, staged: Staged | None) -> None:
    for event in events:
        event.synchronize()
    if staged is not None:
        staged.settle()
        update.stage(staged.tensor)
