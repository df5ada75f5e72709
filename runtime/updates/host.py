"""Starts updates in host memory: what `update_host` and `help_host` do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

import torch

from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates.device_buffers import note_changes
from megacompile.runtime.updates.flight import Flight
from megacompile.runtime.updates.leases import Lease
from megacompile.runtime.updates.update import BucketUpdate
from megacompile.runtime.updates.workers import Job, Workers
from megacompile.views.recorder import Recording


class HostUpdates:
    """The updates of host memory that go on behind `optimizer.step()`."""

    def __init__(self, device: torch.device, cores: Collection[int] = ()) -> None:
        self.workers = Workers(device, cores)

    def start(
        self,
        update: BucketUpdate,
        behind: Sequence[torch.cuda.Event],
        recording: Recording | None,
        written: Callable[[Flight], InFlight],
        staged: Sequence[Lease] = (),
    ) -> Flight:
        """Enqueues an update for a worker; users of its bucket wait for it.

        Args:
            behind: what must be done before it begins: gradients on their way to the host.
            recording: of the run that it belongs to, while a trace is on.
            written: returns what is in flight: the update, and the writes of what it makes on a
                disk.
            staged: states and parameters that are there in memory, or on their way to it.
        """
        bucket = update.bucket
        job = Job(update, functools.partial(_await, behind, update, staged))
        flight = Flight(job.future, bucket.layout.name)
        try:
            if recording is not None:
                job.timed = recording.in_background()
            # the bucket knows of it before anybody can begin it
            bucket.pending.start(written(flight), update.indices, update.visible)
            note_changes(bucket, update.indices)
            self.workers.submit(job)
        except BaseException:
            job.call_off()
            raise
        return flight

    def help(self, flights: Sequence[Flight]) -> None:
        """Makes on the device what it can of these, as long as they wait."""
        self.workers.help({flight.future for flight in flights})


def _await(
    events: Sequence[torch.cuda.Event], update: BucketUpdate, staged: Sequence[Lease]
) -> None:
    for event in events:
        event.synchronize()
    for each in staged:
        each.wait()
    if staged:
        update.stage(lambda tensor: functools.reduce(lambda t, s: s.tensor(t), staged, tensor))
