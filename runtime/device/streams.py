"""The streams of a schedule on a device, the handles with their events, and the slots.

Every op returns a `Handle`: its value, its stream, and the event recorded right after it. An op
that takes a handle from another stream waits for that event first. These edges of the graph are the
only synchronisation. On the CPU, ops run in program order without events.
A graph that uses only the compute stream has no events either, because nothing waits. A handle of
host threads' work (`host`) has no event: its consumer waits on the host.

[Note: deferred copies] A copy from a bucket that the host still updates must not be issued yet, and
later copies on its stream must not overtake it. They are deferred until a consumer needs the result
or the update is complete, whichever the issuing thread reaches first; all independent work is
issued meanwhile. Collectives stay in program order, because every rank must issue them in the same
order: after a deferred collective, all later ones are deferred too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Completion


@dataclass(slots=True, eq=False)
class Handle:
    """A value in flight."""

    value: Any
    stream: Stream
    event: torch.cuda.Event | None = None  # recorded after the op that computes the value
    host: Completion | None = None  # of the host threads that compute the value
    deferred: bool = False  # not issued yet: no value, no event


_Deferred = tuple[Handle, tuple[Handle, ...], Callable[[], Any]]  # its waits, its work


class Streams:
    """Issues work on the compute, h2d, d2h and comm streams of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[Stream, torch.cuda.Stream] = {}
        self._compute: torch.cuda.Stream | None = None
        self._deferred: deque[_Deferred] = deque()  # on the h2d and comm streams
        self.alone = False  # set by the executor: the running graph uses only the compute stream
        if device.type == "cuda":
            # Copies of weights and of gradients overlap compute, one per direction: full duplex.
            # Collectives overlap both; torch's own comm stream waits for this one.
            kinds = (Stream.H2D, Stream.D2H, Stream.COMM)
            self._copies = {kind: torch.cuda.Stream(device) for kind in kinds}

    def run(self) -> AbstractContextManager[None]:
        """A context in which the compute stream is the caller's current stream."""
        self._deferred.clear()  # left by a failed run
        return self._run() if self._copies else nullcontext()

    @contextmanager
    def _run(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            self._compute = torch.cuda.current_stream(self.device)
            yield
            self._catch_up(None)

    def issue(self, stream: Stream, waits: Iterable[Handle], work: Callable[[], Any]) -> Handle:
        """Issue `work` on `stream` after `waits`."""
        if not self._copies:  # no CUDA
            for handle in waits:
                if handle.host is not None:
                    handle.host.wait()
            return Handle(work(), stream)
        waits = tuple(waits)
        self._issue_ready()
        if self._must_wait(stream, waits):
            handle = Handle(None, stream, deferred=True)
            self._deferred.append((handle, waits, work))
            return handle
        wait_for_host(waits)
        for handle in waits:
            if handle.deferred:
                self._catch_up(handle)
        return self._now(Handle(None, stream), waits, work)

    def _must_wait(self, stream: Stream, waits: Sequence[Handle]) -> bool:
        """True if work must be deferred. See [Note: deferred copies]."""
        if stream is Stream.H2D:
            return bool(self._deferred) or _busy(waits)
        if stream is Stream.COMM:
            follows = any(handle.stream is Stream.COMM for handle, *_ in self._deferred)
            return follows or any(handle.deferred for handle in waits)
        return False

    def hand(
        self, stream: Stream, waits: Iterable[Handle], begin: Callable[[], tuple[Any, Completion]]
    ) -> Handle:
        """Start work on host threads, which wait for the events of `waits` themselves. `begin`
        starts it, and returns its value and its completion."""
        for handle in waits:
            if handle.deferred:
                self._catch_up(handle)
        value, end = begin()
        return Handle(value, stream, host=end)

    def _now(self, handle: Handle, waits: Sequence[Handle], work: Callable[[], Any]) -> Handle:
        queue = self._queue(handle.stream)
        for earlier in waits:
            if earlier.stream is not handle.stream and earlier.event is not None:
                queue.wait_event(earlier.event)
        compute = handle.stream is Stream.COMPUTE
        with nullcontext() if compute else torch.cuda.stream(queue):
            handle.value = work()
        handle.deferred = False
        if not (compute and self.alone):
            self.mark(handle)
        return handle

    def mark(self, handle: Handle) -> None:
        """Record an event for the last issued handle, for a wait in another graph."""
        if self._copies and handle.event is None and not handle.deferred:
            handle.event = torch.cuda.Event()
            handle.event.record(self._queue(handle.stream))

    def _issue_ready(self) -> None:
        """Issue deferred work that no longer has to wait."""
        while self._deferred and not _busy(self._deferred[0][1]):
            self._issue_next()

    def _catch_up(self, last: Handle | None) -> None:
        """Issue deferred work up to `last` (None: all of it), waiting for the host."""
        while self._deferred and (last is None or last.deferred):
            self._issue_next()

    def _issue_next(self) -> None:
        handle, waits, work = self._deferred.popleft()
        wait_for_host(waits)
        self._now(handle, waits, work)

    def _queue(self, stream: Stream) -> torch.cuda.Stream:
        if stream is Stream.COMPUTE:
            assert self._compute is not None, "issue() outside of run()"
            return self._compute
        return self._copies[stream]

    def copies(self, stream: Stream) -> torch.cuda.Stream | None:
        """The queue of a copy stream; None on the CPU."""
        return self._copies.get(stream)

    def synchronize(self, stream: Stream) -> None:
        """Wait on the host until everything issued on a copy stream is done."""
        if stream in self._copies:
            self._copies[stream].synchronize()


def _busy(waits: Iterable[Handle]) -> bool:
    return any(handle.host is not None and not handle.host.done() for handle in waits)


def wait_for_host(waits: Iterable[Handle]) -> None:
    for handle in waits:
        if handle.host is not None:
            handle.host.wait()


_NEVER = 2**31


class DeviceSlots:
    """Device buffers that buckets are streamed into, by slot, shared by all schedules of a model.
    Each is as large as the largest bucket it had to hold. Schedules run one after another on the
    compute stream, and each starts with a wait for it (`begin`), so they can share buffers.
    `generation` counts the runs: a backward may reuse its forward's slots only if it is the very
    next run. `left` records the buckets that a forward without a backward leaves in their slots for
    the next forward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[torch.Tensor] = []  # (size_bytes,) uint8 each
        self.generation = 0
        self.stay_from = _NEVER  # the first slot for buckets that stay between forwards
        # slot -> bucket key, and a function: True if the bucket is as it was copied
        self.left: dict[int, tuple[int, Callable[[], bool]]] = {}
        self._views: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def has(self, wanted: Sequence[tuple[int, Bucket]]) -> bool:
        """True if these slots hold these buckets in their current state."""
        for index, bucket in wanted:
            key, is_current = self.left.get(index, (None, None))
            if key != bucket.key or is_current is None or not is_current():
                return False
        return bool(wanted)

    def keeps(self, slots: Sequence[Slot]) -> bool:
        """True if `require` would replace no buffer, so that their contents stay."""
        pairs = zip(slots, self.buffers, strict=False)
        return all(slot.size_bytes <= buffer.numel() for slot, buffer in pairs)

    def require(self, slots: Sequence[Slot]) -> None:
        """Allocate `slots` as needed, and free later ones that were for buckets that stay. Buffers
        that must grow are replaced, on the compute stream. The old buffer is freed to the
        allocator. Its next user on the compute stream runs after every reader of the buffer, and
        these readers ran after the copies into it."""
        keep = max(len(slots), self.stay_from)
        if keep < len(self.buffers):
            del self.buffers[keep:]
            self._views = {key: v for key, v in self._views.items() if key[0] < keep}
            self.left = {index: held for index, held in self.left.items() if index < keep}
            self.generation += 1
        for slot in slots:
            is_new = slot.index == len(self.buffers)  # slots are numbered from 0
            if not is_new and slot.size_bytes <= self.buffers[slot.index].numel():
                continue
            with torch.inference_mode(False):  # later runs write to it outside of inference mode
                buffer = torch.empty(slot.size_bytes, dtype=torch.uint8, device=self.device)
            self.buffers[slot.index : slot.index + 1] = [buffer]
            self._views = {key: v for key, v in self._views.items() if key[0] != slot.index}
            self.generation += 1

    def flat(self, slot: Slot, bucket: Bucket) -> torch.Tensor:
        """The part of a slot that a bucket fills: (bucket.size_bytes,) uint8."""
        return self.buffers[slot.index][: bucket.size_bytes]

    def weights(self, slot: Slot, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """A bucket's parameters as views of a slot."""
        key = (slot.index, bucket.key)
        if key not in self._views:
            buffer = self.buffers[slot.index]
            self._views[key] = tuple(
                buffer[p.offset_bytes : p.offset_bytes + p.size_bytes]
                .view(p.dtype)
                .as_strided(p.shape, p.stride)
                if p.numel
                else torch.empty(p.shape, dtype=p.dtype, device=self.device)
                for p in bucket.params
            )
        return self._views[key]

    def forget(self) -> None:
        """Free the buffers; called when other buckets are streamed, which need other sizes. First
        waits for copies into them that a failed run left in flight."""
        if self.buffers and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.buffers.clear()
        self.left.clear()
        self.stay_from = _NEVER
        self._views.clear()
        self.generation += 1
