"""Work of `optimizer.step()` that goes on after it returns: an update by the host, or the copy of
what the device has updated to the host.

[Note: small chunks] The copy engine that brings states to the host is first in, first out for all
streams: a `loss.item()` waits for everything that was issued before it. So a thread issues the
copies in chunks, three at a time, and sleeps until one is done instead of spinning: the host's
update needs the core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

import torch

from megacompile.errors import OptimizerError
from megacompile.runtime.params.work import InFlight

_COPY_BYTES = 64 * 2**20  # of `copy_in_chunks` at a time; about a millisecond of the link

Timed = Callable[[str, Callable[[], None]], None]  # (lane, work): does it, and notes when


def untimed(lane: str, work: Callable[[], None]) -> None:
    """Does it."""
    del lane
    work()


@dataclass(frozen=True, slots=True)
class Flight(InFlight):
    """The update of a bucket that a thread makes, or brings back."""

    future: Future[None]
    name: str  # of the bucket
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)
    """New parameters on the device, flat, as the next forward reads them: index -> (numel,)."""

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        try:
            error = self.future.exception()
        except CancelledError:  # by a Ctrl-C before it began: nothing has changed
            return
        if error is not None:
            raise OptimizerError(
                f"optimizer.step(): the update of {self.name!r} failed in the background with "
                f"{type(error).__name__}: {error}; its parameters and states are half updated: "
                "load a checkpoint"
            ) from error


def copy_in_chunks(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    queue: torch.cuda.Stream,
    behind: torch.cuda.Event,
) -> None:
    """Copy (there, here) pairs of flat tensors to page-locked host memory, and wait for the end.

    Args:
        queue: the stream that copies.
        behind: what comes first.
    """
    under_way: deque[torch.cuda.Event] = deque()
    with torch.cuda.stream(queue), torch.no_grad():
        queue.wait_event(behind)
        for there, here in pairs:
            numel = _COPY_BYTES // there.itemsize
            for source, target in zip(there.split(numel), here.split(numel), strict=True):
                target.copy_(source, non_blocking=True)
                under_way.append(_event(queue))
                if len(under_way) > 2:
                    under_way.popleft().synchronize()
        _event(queue).synchronize()


def _event(queue: torch.cuda.Stream) -> torch.cuda.Event:
    event: Any = torch.cuda.Event(blocking=True)
    event.record(queue)
    return event  # type: ignore[no-any-return]
