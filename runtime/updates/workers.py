"""Background updates of host memory (`update_host` and `help_host`) by two workers: the host, and a
device that helps (docs/decisions/0013-the-device-helps-the-host.md).

Buckets are queued in the order in which the next forward reads them. The device takes the first
queued bucket, in chunks over the idle link (see `Chunks`). The host takes the first bucket that it
would finish no later than the device, if the device first updated all buckets queued before it.
Each worker's speed is predicted from its latest updates.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from megacompile import log
from megacompile.cost.optimizer import CHUNK_BYTES, CHUNKS
from megacompile.runtime.device.background import Background, at_fork
from megacompile.runtime.optim.blockwise import BLOCK, absmax_numel
from megacompile.runtime.optim.rule import OptimizerRule, Update
from megacompile.runtime.params.pending import InFlight
from megacompile.runtime.updates.bucket_update import update_bucket
from megacompile.runtime.updates.staging import BucketLease
from megacompile.runtime.updates.update import (
    BucketUpdate,
    Timed,
    UpdateBackend,
    fulfil_update,
    untimed,
)
from megacompile.views.recorder import Recording
from megacompile.views.timeline import DEVICE, HOST

_DOUBT = 0.8  # decay of the last update's time, per step without an update
_ALIGNMENT = 256  # bytes
_STEP = 16 * BLOCK  # chunk granularity in elements
_LEAST_BYTES = 2**20  # enough for `_STEP` elements of any dtypes


# Updates of host memory on the device, in chunks that cross the link and return.
#
# One chunk is fetched while a second is updated and a third is copied back, so the slower direction
# of the link is the bottleneck. The kernels round exactly like the host's twins, so the choice of
# worker affects only the time.


class ChunkStreams:
    def __init__(self, device: torch.device) -> None:
        self.h2d, self.compute, self.d2h = (torch.cuda.Stream(device) for _ in range(3))


class Chunks:
    """Buffers on the device for the chunks of some updates, no larger than the largest of them.
    Allocated by the compute thread, so that the memory belongs to the compute stream; used by one
    other thread."""

    def __init__(self, streams: ChunkStreams, updates: Iterable[Update]) -> None:
        self.streams = streams
        self.device = streams.compute.device
        largest = max(_bytes_of(update, update.param.numel()) for update in updates)
        self.buffer_bytes = max(min(largest, CHUNK_BYTES), _LEAST_BYTES)
        self.buffers = [
            torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)
            for _ in range(CHUNKS)
        ]
        # earlier work on this memory; chunks wait for it (write after read)
        self.ours = torch.cuda.current_stream(self.device).record_event()

    @torch.no_grad()
    def update(self, rule: OptimizerRule, updates: Iterable[Update]) -> None:
        """Run updates of flat tensors in page-locked host memory and wait for completion. The first
        chunk of an update is fetched while the last chunks of the previous one are copied back."""
        parts = (chunk for whole in updates for chunk in _chunks(whole, self.buffer_bytes))
        ends: list[torch.cuda.Event | None] = [None] * len(self.buffers)
        with torch.cuda.device(self.device):
            self.streams.h2d.wait_event(self.ours)
            try:
                for k, chunk in enumerate(parts):
                    at = k % len(self.buffers)
                    if (end := ends[at]) is not None:
                        end.synchronize()
                    ends[at] = _issue(rule, chunk, self.buffers[at], self.streams)
                for end in ends:
                    if end is not None:
                        end.synchronize()
            except BaseException:  # a chunk that failed halfway has no completion event
                for stream in (self.streams.h2d, self.streams.compute, self.streams.d2h):
                    stream.synchronize()
                raise


def _issue(
    rule: OptimizerRule, on_host: Update, buffer: torch.Tensor, streams: ChunkStreams
) -> torch.cuda.Event:
    """Fetch a chunk, update it and copy it back; returns its completion event."""
    on_device = _placed(on_host, buffer)
    with torch.cuda.stream(streams.h2d):
        _copy(on_device, on_host, fetched=True)
    streams.compute.wait_stream(streams.h2d)
    with torch.cuda.stream(streams.compute):
        update_bucket(rule, [on_device])
    streams.d2h.wait_stream(streams.compute)
    with torch.cuda.stream(streams.d2h):
        _copy(on_host, on_device, fetched=False)
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)
        event.record()
    return event


def _copy(into: Update, source: Update, *, fetched: bool) -> None:
    """Copy an update's inputs to the device, or its results to the host."""
    for (name, a), (_, b) in zip(into.tensors(), source.tensors(), strict=True):
        if name != ("copy" if fetched else "grad"):
            a.copy_(b, non_blocking=True)


def _chunks(whole: Update, buffer_bytes: int) -> Iterator[Update]:
    """Split an update into parts whose tensors fit into this many bytes."""
    numel = whole.param.numel()
    step = max(1, buffer_bytes // _bytes_of(whole, _STEP)) * _STEP
    for start in range(0, numel, step):
        yield whole.part(start, min(start + step, numel))


def _bytes_of(update: Update, numel: int) -> int:
    """Bytes for this many elements, each tensor rounded up to the alignment of the next."""
    return sum(
        _rounded((absmax_numel(numel) if name == "absmax" else numel) * tensor.itemsize)
        for name, tensor in update.tensors()
    )


def _placed(part: Update, buffer: torch.Tensor) -> Update:
    sizes = [_rounded(tensor.nbytes) for _, tensor in part.tensors()]
    spans = iter(buffer[: sum(sizes)].split(sizes))
    return part.map(lambda _, tensor: next(spans)[: tensor.nbytes].view(tensor.dtype))


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


# The workers.


@dataclass(slots=True, eq=False)
class Job:
    update: BucketUpdate
    await_gradients: Callable[[], None] = lambda: None
    timed: Timed = untimed
    future: Future[None] = field(default_factory=Future)
    since_s: float = field(default_factory=time.perf_counter)

    def run(self, lane: str, work: Callable[[], None], pace: Pace) -> None:
        """Run the update; an error is stored in the future."""

        def timed() -> None:
            start = time.perf_counter()
            work()
            pace.learn(self.update, time.perf_counter() - start)

        def run() -> None:
            self.await_gradients()
            self.timed(lane, timed)

        fulfil_update(self.future, self.update.bucket.layout.name, run)

    def call_off(self) -> None:
        """Cancel the update, unless it has started."""
        if self.future.cancel():
            self.timed(HOST, lambda: None)  # a trace waits for its times


class Pace:
    """A worker's seconds per element for each kind of update."""

    def __init__(self) -> None:
        self._learned = False
        self._last: dict[UpdateBackend, float] = {}
        self._best: dict[UpdateBackend, float] = {}

    def seconds(self, update: BucketUpdate) -> float | None:
        """The estimate for this update; None before the first update of its kind."""
        each = self._last.get(update.backend)
        return None if each is None else each * update.numel

    def learn(self, update: BucketUpdate, seconds: float) -> None:
        each = self._last[update.backend] = seconds / max(1, update.numel)
        self._best[update.backend] = min(each, self._best.get(update.backend, each))
        self._learned = True

    def begin(self) -> None:
        """Start a step. If the last step measured nothing, the estimate decays, because the last
        update may have been slow by chance. It never drops below the fastest time."""
        if not self._learned:
            for backend, each in tuple(self._last.items()):
                self._last[backend] = max(_DOUBT * each, self._best[backend])
        self._learned = False


class Workers:
    """A thread for the host's updates, and one that issues the device's. Users of a bucket wait for
    its update, which continues after `optimizer.step()` returns.

    It needs no lock ([Note: interrupts] in `device.background`): removing a job from the deque
    claims it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device  # the one that helps
        self.patience_s = 0.1  # for a device that is about to help
        self.make_streams: Callable[[torch.device], ChunkStreams] = ChunkStreams
        self.make_chunks: Callable[[ChunkStreams, Sequence[Update]], Chunks] = Chunks
        self._waiting: deque[Job] = deque()
        self._helped: deque[Collection[Future[None]]] = deque()  # jobs for the device
        self._device_ends_s = 0.0  # when the device's current job ends, if known
        self._host_pace, self._device_pace = Pace(), Pace()
        self._host = Background("megacompile-update")
        self._issues = Background("megacompile-chunks")
        self._streams: ChunkStreams | None = None
        at_fork(self)

    def start(
        self,
        update: BucketUpdate,
        after: Sequence[torch.cuda.Event],  # of gradients in flight to the host
        recording: Recording | None,
        # adds the writes to a disk to the work in flight; None: there are none
        written: Callable[[InFlight], InFlight] | None = None,
        staged: Sequence[BucketLease] = (),  # of states and parameters from a disk
    ) -> InFlight:
        bucket = update.bucket
        job = Job(update, functools.partial(_await, after, update, staged))
        flying = InFlight(future=job.future)
        try:
            if recording is not None:
                job.timed = recording.in_background()
            # register with the bucket before it can start
            work = flying if written is None else written(flying)
            bucket.pending.start(work, update.indices, update.visible)
            bucket.note_changes(update.indices)
            self.submit(job)
        except BaseException:
            job.call_off()
            if bucket.pending.in_flight is None:  # no waiter will start its writes
                for lease in staged:
                    lease.write = None  # so the failed run gives it up
            raise
        return flying

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        self._host.submit(self._by_host)

    def help(self, futures: Collection[Future[None]]) -> None:
        """Update queued buckets on the device if possible, in order. Called by the compute thread,
        whose stream owns the memory."""
        # read the runs now, because a worker takes them out of its job
        updates = [
            update
            for job in tuple(self._waiting)
            if job.update.on_device and job.future in futures
            for update in job.update.runs
        ]
        if not updates:
            return
        if self._streams is None:
            self._streams = self.make_streams(self.device)
        try:
            chunks = self.make_chunks(self._streams, updates)
        except torch.OutOfMemoryError:
            log.logger("update").info("no device memory is left to help the host with updates")
            return
        self._host_pace.begin()
        self._issues.submit(functools.partial(self._by_device, chunks, futures))

    def after_fork(self, *, in_child: bool) -> None:
        """Drop, in a child of a fork, jobs that other threads have queued meanwhile."""
        if in_child:
            self._waiting.clear()
            self._helped.clear()

    def _by_host(self) -> None:
        while True:  # also runs jobs of an interrupted `submit`
            self._await_help()
            job = self._for_host()
            if job is None:
                return
            job.run(HOST, job.update, self._host_pace)

    def _by_device(self, chunks: Chunks, futures: Collection[Future[None]]) -> None:
        self._helped.append(futures)
        while (job := self._for_device(futures)) is not None:
            self._device_ends_s = time.perf_counter() + (self._device_pace.seconds(job.update) or 0)
            by_chunks = functools.partial(job.update.by_chunks, chunks.update)
            job.run(DEVICE, by_chunks, self._device_pace)
            self._host.submit(self._by_host)  # the host may have left too many jobs to the device
        self._helped.remove(futures)
        self._host.submit(self._by_host)  # some jobs may not be for the device

    def _await_help(self) -> None:
        """Wait until a faster device starts to help, after all updates are queued, so that it gets
        the first one."""
        first = next(iter(tuple(self._waiting)), None)
        if first is None or not first.update.on_device:
            return
        mine_s = self._host_pace.seconds(first.update)
        its_s = self._device_pace.seconds(first.update)
        if mine_s is None or its_s is None or mine_s <= its_s:
            return
        while not self._is_helped(first) and time.perf_counter() < first.since_s + self.patience_s:
            time.sleep(0.001)

    def _for_host(self) -> Job | None:
        """Claim the first job that the host would finish no later than the device."""
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
        """Claim a job; False if the other worker has it."""
        try:
            self._waiting.remove(job)
        except ValueError:
            return False
        return True


def _await(
    events: Sequence[torch.cuda.Event], update: BucketUpdate, staged: Sequence[BucketLease]
) -> None:
    for event in events:
        event.synchronize()
    for each in staged:
        each.wait()
    if staged:
        update.stage(lambda tensor: functools.reduce(lambda t, s: s.tensor(t), staged, tensor))
