"""The three streams of a schedule on a device, and the handles that carry their events.

Every op gives a `Handle`: its value, its stream, and the event recorded right after it. An op
that takes a handle of another stream waits for that event first. That is the whole of the
synchronisation: the edges of the graph, and nothing else. On the CPU ops run in program order and
events are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from megacompile.ir import Stream


class Handle(NamedTuple):
    """A value in flight."""

    value: Any
    stream: Stream
    event: torch.cuda.Event | None  # recorded behind the op that makes the value


class Streams:
    """Issues work on the compute, h2d and d2h streams of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[Stream, torch.cuda.Stream] = {}
        self._compute: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # h2d overlaps weights with compute, d2h gradients: one each way, full duplex
            self._copies = {
                Stream.H2D: torch.cuda.Stream(device),
                Stream.D2H: torch.cuda.Stream(device),
            }

    @contextmanager
    def run(self) -> Iterator[None]:
        """For its duration, compute is the caller's current stream."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device):
            self._compute = torch.cuda.current_stream(self.device)
            yield

    def issue(
        self, stream: Stream, waits: Iterable[Handle], work: Callable[[], Any]
    ) -> tuple[Any, torch.cuda.Event | None]:
        """Run `work` on `stream` behind `waits`; gives its result and the event behind it."""
        if self.device.type != "cuda":
            return work(), None
        queue = self._queue(stream)
        for handle in waits:
            if handle.stream is not stream and handle.event is not None:
                queue.wait_event(handle.event)
        with nullcontext() if stream is Stream.COMPUTE else torch.cuda.stream(queue):
            result = work()
        event = torch.cuda.Event()
        event.record(queue)
        return result, event

    def _queue(self, stream: Stream) -> torch.cuda.Stream:
        if stream is Stream.COMPUTE:
            assert self._compute is not None, "issue() outside of run()"
            return self._compute
        return self._copies[stream]

    def synchronize(self, stream: Stream) -> None:
        """Wait on the host until everything issued on a copy stream is done."""
        if stream in self._copies:
            self._copies[stream].synchronize()
