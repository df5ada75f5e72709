"""Who carries out the updates of host memory, in the background: the host, helped by the device.

The host's thread takes the first bucket that waits, because the next forward reads that first; the
device takes the last one, in chunks over a link that is idle (see `chunks`). They meet somewhere in
the middle, wherever their rates of the day let them: nobody has to know those.

Source of the idea: Maurya et al., "Deep Optimizer States: Towards Scalable Training of Transformer
Models Using Interleaved Offloading", 2024, arXiv 2410.21316, which divides the work beforehand.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from megacompile import log
from megacompile.runtime.device import forks
from megacompile.runtime.device.background import Background, fulfil
from megacompile.runtime.updates.chunks import Chunks, ChunkStreams
from megacompile.runtime.updates.flight import Timed, untimed
from megacompile.runtime.updates.update import BucketUpdate
from megacompile.tracing.timeline import DEVICE, HOST


@dataclass(slots=True, eq=False)
class Job:
    """An update that waits for somebody to make it."""

    update: BucketUpdate
    await_gradients: Callable[[], None] = lambda: None
    timed: Timed = untimed
    future: Future[None] = field(default_factory=Future)

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """Make it; what goes wrong is the future's."""
        fulfil(self.future, functools.partial(self._run, lane, work))

    def _run(self, lane: str, work: Callable[[], None]) -> None:
        self.await_gradients()
        self.timed(lane, work)

    def call_off(self) -> None:
        """It need not be made, unless somebody has begun."""
        if self.future.cancel():
            self.timed(HOST, lambda: None)  # a trace waits for its end


class Workers:
    """A thread for the host's updates, and one that issues the device's.

    There is no lock (see `background`): a job is whose who has taken it out of the deque.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._waiting: deque[Job] = deque()
        self._host = Background("megacompile-update")
        self._issues = Background("megacompile-chunks")
        self._streams: ChunkStreams | None = None
        forks.tell(self)

    def submit(self, job: Job) -> None:
        """Let it wait behind those that do."""
        self._waiting.append(job)
        self._host.submit(self._first)

    def help(self, futures: Collection[Future[None]]) -> None:
        """Let the device make what it can of these that wait, the last one first.

        Called by the thread that computes, whose stream's memory is used.
        """
        # who makes one takes its runs away, but this is a list of what there was
        updates = [
            run.update
            for job in tuple(self._waiting)
            if job.update.on_device and job.future in futures
            for run in job.update.runs
        ]
        if not updates:
            return
        if self._streams is None:
            self._streams = ChunkStreams(self.device)
        try:
            chunks = Chunks(self._streams, updates)
        except torch.OutOfMemoryError:
            log.logger("update").info("no device memory is left to help the host with updates")
            return
        self._issues.submit(functools.partial(self._last_ones, chunks, futures))

    def before_fork(self) -> None:
        """The buckets wait for what waits here."""

    def after_fork(self, *, in_child: bool) -> None:
        """What another thread has given since is its own, and not the child's."""
        if in_child:
            self._waiting.clear()

    def _first(self) -> None:
        while True:  # also one that was left behind when a `submit` was interrupted
            try:
                job = self._waiting.popleft()
            except IndexError:
                return
            job.run(HOST, job.update)

    def _last_ones(self, chunks: Chunks, futures: Collection[Future[None]]) -> None:
        while (job := self._last(futures)) is not None:
            job.run(DEVICE, functools.partial(job.update.by_chunks, chunks))

    def _last(self, futures: Collection[Future[None]]) -> Job | None:
        for job in reversed(tuple(self._waiting)):
            if job.update.on_device and job.future in futures:
                try:
                    self._waiting.remove(job)
                except ValueError:
                    continue  # the host was faster
                return job
        return None
