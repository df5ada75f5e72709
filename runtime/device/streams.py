"""The streams of a schedule on a device, and the handles with their events.

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


@dataclass(frozen=True, slots=True)
class _Deferred:
    handle: Handle
    waits: tuple[Handle, ...]
    work: Callable[[], Any]


class Streams:
    """Issues work on the compute, h2d, d2h and comm streams of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[Stream, torch.cuda.Stream] = {}
        self._compute: torch.cuda.Stream | None = None
        self._deferred: deque[_Deferred] = deque()  # on the h2d and comm streams
        # True if the running graph uses only the compute stream; then events are unnecessary. Set
        # by the executor
        self.alone = False
        if device.type == "cuda":
            # h2d overlaps weights with compute, d2h overlaps gradients: one per direction, full
            # duplex
            self._copies = {
                Stream.H2D: torch.cuda.Stream(device),
                Stream.D2H: torch.cuda.Stream(device),
                # collectives overlap copies and compute; torch's own comm stream waits for this one
                Stream.COMM: torch.cuda.Stream(device),
            }

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
            self._deferred.append(_Deferred(handle, waits, work))
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
            behind = any(entry.handle.stream is Stream.COMM for entry in self._deferred)
            return behind or any(handle.deferred for handle in waits)
        return False

    def hand(
        self, stream: Stream, waits: Iterable[Handle], begin: Callable[[], tuple[Any, Completion]]
    ) -> Handle:
        """Start work on host threads, which wait for the events of `waits` themselves.

        Args:
            begin: starts the work; returns its value and its completion.
        """
        for handle in waits:
            if handle.deferred:
                self._catch_up(handle)
        value, end = begin()
        return Handle(value, stream, host=end)

    def wait_on_compute(self, event: torch.cuda.Event) -> None:
        """Make later work on the caller's stream wait."""
        torch.cuda.current_stream(self.device).wait_event(event)

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
        while self._deferred and not _busy(self._deferred[0].waits):
            self._issue_next()

    def _catch_up(self, last: Handle | None) -> None:
        """Issue deferred work up to `last` (None: all of it), waiting for the host."""
        while self._deferred and (last is None or last.deferred):
            self._issue_next()

    def _issue_next(self) -> None:
        entry = self._deferred.popleft()
        wait_for_host(entry.waits)
        self._now(entry.handle, entry.waits, entry.work)

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
    """True if host threads still do that work."""
    return any(handle.host is not None and not handle.host.done() for handle in waits)


def wait_for_host(waits: Iterable[Handle]) -> None:
    """Wait for the host threads."""
    for handle in waits:
        if handle.host is not None:
            handle.host.wait()
