"""Updates of host memory that the device makes: chunk by chunk over the link, and back.

A chunk is fetched while another one is updated and a third one brought back, so what limits it is
the slower direction of the link. The arithmetic is that of the kernels, which round as the host's
rule does, bit by bit: who updates a bucket shows in the time alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megacompile.cost.optimizer import CHUNK_BYTES, CHUNKS
from megacompile.runtime.optim.blockwise import BLOCK, absmax_numel
from megacompile.runtime.optim.kernels.bucket import update_bucket
from megacompile.runtime.optim.rule import OptimizerRule, Update

_ALIGNMENT = 256  # bytes
_STEP = 16 * BLOCK  # elements that a chunk is a multiple of
_LEAST_BYTES = 2**20  # enough for so many of any dtypes


class ChunkStreams:
    """The streams that chunks move on, next to those of the schedules."""

    def __init__(self, device: torch.device) -> None:
        self.h2d, self.compute, self.d2h = (torch.cuda.Stream(device) for _ in range(3))


class Chunks:
    """Buffers on the device for the chunks of some updates.

    Made by the thread that computes, so that they are of its stream's memory and go back to it;
    used by one other thread.

    Args:
        streams: of the device that the buffers are on.
        updates: that will be made; the buffers are no larger than the largest of them.
    """

    def __init__(self, streams: ChunkStreams, updates: Iterable[Update]) -> None:
        self.streams = streams
        self.device = streams.compute.device
        largest = max(_bytes_of(update, update.param.numel()) for update in updates)
        self.buffer_bytes = max(min(largest, CHUNK_BYTES), _LEAST_BYTES)
        self.buffers = [
            torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)
            for _ in range(CHUNKS)
        ]
        self.ours = torch.cuda.current_stream(self.device).record_event()  # from then on

    @torch.no_grad()
    def update(self, updates: Iterable[tuple[OptimizerRule, Update]]) -> None:
        """Make updates of flat tensors in page-locked host memory, and wait for their end.

        The first chunk of one comes in while the last ones of that before it go out.
        """
        parts = (
            (rule, here) for rule, whole in updates for here in chunks(whole, self.buffer_bytes)
        )
        ends: list[torch.cuda.Event | None] = [None] * len(self.buffers)
        with torch.cuda.device(self.device):
            self.streams.h2d.wait_event(self.ours)
            try:
                for k, (rule, here) in enumerate(parts):
                    at = k % len(self.buffers)
                    if (end := ends[at]) is not None:
                        end.synchronize()
                    ends[at] = _issue(rule, here, self.buffers[at], self.streams)
                for end in ends:
                    if end is not None:
                        end.synchronize()
            except BaseException:  # a chunk that was begun has no end
                for stream in (self.streams.h2d, self.streams.compute, self.streams.d2h):
                    stream.synchronize()
                raise


def _issue(
    rule: OptimizerRule, here: Update, buffer: torch.Tensor, streams: ChunkStreams
) -> torch.cuda.Event:
    """Fetch a chunk, update it, bring it back; returns the event of its end."""
    there = _placed(here, buffer)
    with torch.cuda.stream(streams.h2d):
        _copy(there, here, fetched=True)
    streams.compute.wait_stream(streams.h2d)
    with torch.cuda.stream(streams.compute):
        update_bucket(rule, [there])
    streams.d2h.wait_stream(streams.compute)
    with torch.cuda.stream(streams.d2h):
        _copy(here, there, fetched=False)
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)
        event.record()
    return event


def _copy(into: Update, source: Update, *, fetched: bool) -> None:
    """Copies what an update reads to the device, or what it has written to the host."""
    for (name, a), (_, b) in zip(into.tensors(), source.tensors(), strict=True):
        if name != ("copy" if fetched else "grad"):
            a.copy_(b, non_blocking=True)


def chunks(whole: Update, buffer_bytes: int) -> Iterator[Update]:
    """An update in parts whose tensors fit into so many bytes together."""
    numel = whole.param.numel()
    each = _bytes_of(whole, _STEP)
    step = max(1, buffer_bytes // each) * _STEP
    for start in range(0, numel, step):
        yield _part(whole, start, min(start + step, numel))


def _part(whole: Update, start: int, stop: int) -> Update:
    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "absmax":
            first = start // BLOCK
            return tensor[first : first + absmax_numel(stop - start)]
        return tensor[start:stop]

    return whole.map(part)


def _bytes_of(update: Update, numel: int) -> int:
    """Bytes of so many elements, each tensor rounded up to where the next one may begin."""
    total = 0
    for name, tensor in update.tensors():
        count = absmax_numel(numel) if name == "absmax" else numel
        total += _rounded(count * tensor.itemsize)
    return total


def _placed(here: Update, buffer: torch.Tensor) -> Update:
    """Tensors like these in a buffer."""
    offset = 0

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        del name
        nonlocal offset
        size = tensor.numel() * tensor.itemsize
        made = buffer[offset : offset + size].view(tensor.dtype)
        offset += _rounded(size)
        return made

    return here.map(place)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
