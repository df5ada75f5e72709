"""The updates of host memory, in the background (`update_host` and `help_host`): workers carry them
out, the host and a device that helps.

Buckets wait in the order in which the next forward reads them. The device takes the first one that
waits, in chunks over a link that is idle (see `chunks`). The host takes the first one that it ends
no later than the device would, were that to make all that waits before it too. Where both are as
fast, they take turns; where the host is ten times slower, it takes the tenth, or none where fewer
wait. How long each takes is known from its last updates.

Source of the idea: Maurya et al., "Deep Optimizer States: Towards Scalable Training of Transformer
Models Using Interleaved Offloading", 2024, arXiv 2410.21316, which divides the work beforehand.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from megacompile import log
from megacompile.runtime.device import forks
from megacompile.runtime.device.background import Background
from megacompile.runtime.optim.rule import Update
from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates.chunks import Chunks, ChunkStreams
from megacompile.runtime.updates.device_buffers import (
    Timed,
    fulfil_update,
    note_changes,
    untimed,
)
from megacompile.runtime.updates.leases import BucketLease
from megacompile.runtime.updates.update import BucketUpdate, UpdateBackend
from megacompile.views.recorder import Recording
from megacompile.views.timeline import DEVICE, HOST

_DOUBT = 0.8  # of the time of the last update, for each step in which there was none
_PATIENCE_S = 0.1  # for the device, which helps once all updates of a step were started


@dataclass(slots=True, eq=False)
class Job:
    """An update that waits for a worker."""

    update: BucketUpdate
    await_gradients: Callable[[], None] = lambda: None
    timed: Timed = untimed
    future: Future[None] = field(default_factory=Future)
    since_s: float = field(default_factory=time.perf_counter)

    def run(self, lane: str, work: Callable[[], None]) -> None:
        """Make it; what goes wrong is the future's."""
        name = self.update.bucket.layout.name
        fulfil_update(self.future, name, functools.partial(self._run, lane, work))

    def _run(self, lane: str, work: Callable[[], None]) -> None:
        self.await_gradients()
        self.timed(lane, work)

    def call_off(self) -> None:
        """It need not be made, unless it has begun."""
        if self.future.cancel():
            self.timed(HOST, lambda: None)  # a trace waits for its end


class Pace:
    """Seconds an element that a worker takes for an update of a kind."""

    def __init__(self) -> None:
        self._learned = False
        self._last: dict[UpdateBackend, float] = {}
        self._best: dict[UpdateBackend, float] = {}

    def seconds(self, update: BucketUpdate) -> float | None:
        """For this update; None: there was none of its kind yet."""
        each = self._last.get(update.backend)
        return None if each is None else each * update.numel

    def learn(self, update: BucketUpdate, seconds: float) -> None:
        """It has taken so long."""
        each = self._last[update.backend] = seconds / max(1, update.numel)
        self._best[update.backend] = min(each, self._best.get(update.backend, each))
        self._learned = True

    def begin(self) -> None:
        """A step begins. If nothing was learned in the one before, the last update may have been
        slow by chance, and a faster one is expected; none that is faster than the fastest."""
        if not self._learned:
            for backend, each in tuple(self._last.items()):
                self._last[backend] = max(_DOUBT * each, self._best[backend])
        self._learned = False


class Workers:
    """A thread for the host's updates, and one that issues the device's.

    There is no lock (see `background`): a job is whose who has taken it out of the deque.

    Args:
        device: that helps.
        cores: on which the host updates; none: on any.
        streams: makes those that chunks go through.
        chunks: makes what takes updates through them.
        patience_s: with a device that is to help.
    """

    def __init__(
        self,
        device: torch.device,
        cores: Collection[int] = (),
        *,
        streams: Callable[[torch.device], ChunkStreams] = ChunkStreams,
        chunks: Callable[[ChunkStreams, Sequence[Update]], Chunks] = Chunks,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.device = device
        self._make_streams, self._make_chunks, self._patience_s = streams, chunks, patience_s
        self._waiting: deque[Job] = deque()
        self._helped: deque[Collection[Future[None]]] = deque()  # which the device will come to
        self._device_ends_s = 0.0  # what it makes, as far as is known
        self._host_pace, self._device_pace = Pace(), Pace()
        self._host = Background("megacompile-update", cores)
        self._issues = Background("megacompile-chunks")
        self._streams: ChunkStreams | None = None
        forks.tell(self)

    def submit(self, job: Job) -> None:
        """Enqueues a job."""
        self._waiting.append(job)
        self._host.submit(self._by_host)

    def help(self, futures: Collection[Future[None]]) -> None:
        """Makes on the device what it can of these that wait, the first one first.

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
            self._streams = self._make_streams(self.device)
        try:
            chunks = self._make_chunks(self._streams, updates)
        except torch.OutOfMemoryError:
            log.logger("update").info("no device memory is left to help the host with updates")
            return
        self._host_pace.begin()
        self._issues.submit(functools.partial(self._by_device, chunks, futures))

    def before_fork(self) -> None:
        """The buckets wait for what waits here."""

    def after_fork(self, *, in_child: bool) -> None:
        """Leaves what another thread has given since to it: it is not the child's."""
        if in_child:
            self._waiting.clear()
            self._helped.clear()

    def _by_host(self) -> None:
        while True:  # also one that was left behind when a `submit` was interrupted
            self._await_help()
            job = self._for_host()
            if job is None:
                return
            self._make(job, HOST, job.update, self._host_pace)

    def _by_device(self, chunks: Chunks, futures: Collection[Future[None]]) -> None:
        self._helped.append(futures)
        while (job := self._for_device(futures)) is not None:
            self._device_ends_s = time.perf_counter() + (self._device_pace.seconds(job.update) or 0)
            by_chunks = functools.partial(job.update.by_chunks, chunks)
            self._make(job, DEVICE, by_chunks, self._device_pace)
            self._host.submit(self._by_host)  # who may have left it too much
        self._helped.remove(futures)
        self._host.submit(self._by_host)  # or what the device cannot make

    def _await_help(self) -> None:
        """Updates are started one by one, and then the device begins to help: if it is faster, the
        first one is not the host's."""
        first = next(iter(tuple(self._waiting)), None)
        if first is None or not first.update.on_device:
            return
        mine_s = self._host_pace.seconds(first.update)
        its_s = self._device_pace.seconds(first.update)
        if mine_s is None or its_s is None or mine_s <= its_s:
            return
        while not self._is_helped(first) and time.perf_counter() < first.since_s + self._patience_s:
            time.sleep(0.001)

    def _make(self, job: Job, lane: str, work: Callable[[], None], pace: Pace) -> None:
        def timed() -> None:
            start = time.perf_counter()
            work()
            pace.learn(job.update, time.perf_counter() - start)

        job.run(lane, timed)

    def _for_host(self) -> Job | None:
        """The first one that it ends no later than the device would."""
        device_s = max(0.0, self._device_ends_s - time.perf_counter())
        for job in tuple(self._waiting):
            if self._is_helped(job):
                mine_s = self._host_pace.seconds(job.update)
                its_s = self._device_pace.seconds(job.update)
                device_s += math.inf if its_s is None else its_s
                if mine_s is not None and mine_s > device_s:
                    continue
            if self._take(job):
                return job
        return None

    def _for_device(self, futures: Collection[Future[None]]) -> Job | None:
        for job in tuple(self._waiting):
            if job.update.on_device and job.future in futures and self._take(job):
                return job
        return None

    def _is_helped(self, job: Job) -> bool:
        return job.update.on_device and any(job.future in futures for futures in list(self._helped))

    def _take(self, job: Job) -> bool:
        """The first worker that can makes it."""
        try:
            self._waiting.remove(job)
        except ValueError:
            return False
        return True


# The ops start them, and buckets know of them until they are done.


class HostUpdates:
    """The updates of host memory that go on behind `optimizer.step()`."""

    def __init__(self, device: torch.device, cores: Collection[int] = ()) -> None:
        self.workers = Workers(device, cores)

    def start(
        self,
        update: BucketUpdate,
        behind: Sequence[torch.cuda.Event],
        recording: Recording | None,
        written: Callable[[InFlight], InFlight],
        staged: Sequence[BucketLease] = (),
    ) -> InFlight:
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
        made = InFlight(future=job.future)
        try:
            if recording is not None:
                job.timed = recording.in_background()
            # the bucket knows of it before anybody can begin it
            bucket.pending.start(written(made), update.indices, update.visible)
            note_changes(bucket, update.indices)
            self.workers.submit(job)
        except BaseException:
            job.call_off()
            raise
        return made

    def help(self, updates: Iterable[InFlight]) -> None:
        """Makes on the device what it can of these, as long as they wait."""
        self.workers.help({each.future for each in updates if each.future is not None})


def _await(
    events: Sequence[torch.cuda.Event], update: BucketUpdate, staged: Sequence[BucketLease]
) -> None:
    for event in events:
        event.synchronize()
    for each in staged:
        each.wait()
    if staged:
        update.stage(lambda tensor: functools.reduce(lambda t, s: s.tensor(t), staged, tensor))
