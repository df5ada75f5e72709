"""The streams of a schedule on a device, and the handles that carry their events.

Every op returns a `Handle`: its value, its stream, and the event recorded right after it. An op
that takes a handle of another stream waits for that event first. That is the whole of the
synchronisation: the edges of the graph, and nothing else. On the CPU ops run in program order and
events are absent. So they are where a graph has no other stream than compute: nothing waits.

A handle of what threads of the host do (`host`) has no event: who takes it waits on the host.

[Note: deferred copies] A copy from a bucket that the host still updates must not be issued yet, nor
may its stream's later copies overtake it. They are put off until the result is taken, or
until the update is over, whichever the issuing thread meets first; everything that does not need
them is issued in the meantime. Collectives stay in program order, since every rank must issue them
in the same: after one that is put off, all that follow are.
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
    event: torch.cuda.Event | None = None  # recorded after the op that makes the value
    host: Completion | None = None  # of the threads that make the value
    deferred: bool = False  # not issued yet: there is no value and no event


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
        # is compute the only stream of the graph that runs? Then a value is there as soon as its op
        # is issued. Set by who runs it
        self.alone = False
        if device.type == "cuda":
            # h2d overlaps weights with compute, d2h gradients: one each way, full duplex
            self._copies = {
                Stream.H2D: torch.cuda.Stream(device),
                Stream.D2H: torch.cuda.Stream(device),
                # collectives overlap both, and compute; torch makes theirs wait for this one
                Stream.COMM: torch.cuda.Stream(device),
            }

    def run(self) -> AbstractContextManager[None]:
        """For its duration, compute is the caller's current stream."""
        self._deferred.clear()  # of a run that failed
        return self._run() if self._copies else nullcontext()

    @contextmanager
    def _run(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            self._compute = torch.cuda.current_stream(self.device)
            yield
            self._catch_up(None)

    def issue(self, stream: Stream, waits: Iterable[Handle], work: Callable[[], Any]) -> Handle:
        """Run `work` on `stream` after `waits`."""
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
        """Is work to be put off? See [Note: deferred copies]."""
        if stream is Stream.H2D:
            return bool(self._deferred) or _busy(waits)
        if stream is Stream.COMM:
            behind = any(entry.handle.stream is Stream.COMM for entry in self._deferred)
            return behind or any(handle.deferred for handle in waits)
        return False

    def hand(
        self, stream: Stream, waits: Iterable[Handle], begin: Callable[[], tuple[Any, Completion]]
    ) -> Handle:
        """Makes threads of the host `begin` work, which wait for the events of `waits` themselves.

        Args:
            begin: returns what they work on, and the end of that.
        """
        for handle in waits:
            if handle.deferred:
                self._catch_up(handle)
        value, end = begin()
        return Handle(value, stream, host=end)

    def wait_on_compute(self, event: torch.cuda.Event) -> None:
        """Makes what comes next on the caller's stream wait."""
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
        """Gives the handle of what was issued last an event, for a wait in another graph."""
        if self._copies and handle.event is None and not handle.deferred:
            handle.event = torch.cuda.Event()
            handle.event.record(self._queue(handle.stream))

    def _issue_ready(self) -> None:
        """Issue what was put off and need not wait any more."""
        while self._deferred and not _busy(self._deferred[0].waits):
            self._issue_next()

    def _catch_up(self, last: Handle | None) -> None:
        """Issue what was put off, up to `last` (None: all of it), waiting for the host."""
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
    """True if threads of the host still do that work."""
    return any(handle.host is not None and not handle.host.done() for handle in waits)


def wait_for_host(waits: Iterable[Handle]) -> None:
    """Wait for the threads of the host."""
    for handle in waits:
        if handle.host is not None:
            handle.host.wait()
