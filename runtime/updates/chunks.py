"""Updates of host memory on the device, in chunks that cross the link and return.

One chunk is fetched while a second is updated and a third is copied back, so the slower direction
of the link is the bottleneck. The kernels round exactly like the host's twins, so the choice of
worker affects only the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megacompile.cost.optimizer import CHUNK_BYTES, CHUNKS
from megacompile.runtime.optim.blockwise import BLOCK, absmax_numel
from megacompile.runtime.optim.kernels.entry import update_bucket
from megacompile.runtime.optim.rule import OptimizerRule, Update

_ALIGNMENT = 256  # bytes
_STEP = 16 * BLOCK  # chunk granularity in elements
_LEAST_BYTES = 2**20  # enough for `_STEP` elements of any dtypes


class ChunkStreams:
    """Streams for chunks, separate from the schedules' streams."""

    def __init__(self, device: torch.device) -> None:
        self.h2d, self.compute, self.d2h = (torch.cuda.Stream(device) for _ in range(3))


class Chunks:
    """Buffers on the device for the chunks of some updates.

    Allocated by the compute thread, so that the memory belongs to the compute stream; used by one
    other thread.

    Args:
        streams: the streams of the buffers' device.
        updates: the coming updates; the buffers are no larger than the largest of them.
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
        # work that used this memory before; chunks wait for it (write after read)
        self.ours = torch.cuda.current_stream(self.device).record_event()

    @torch.no_grad()
    def update(self, updates: Iterable[tuple[OptimizerRule, Update]]) -> None:
        """Run updates of flat tensors in page-locked host memory and wait for completion.

        The first chunk of an update is fetched while the last chunks of the previous one are copied
        back.
        """
        parts = (
            (rule, chunk) for rule, whole in updates for chunk in chunks(whole, self.buffer_bytes)
        )
        ends: list[torch.cuda.Event | None] = [None] * len(self.buffers)
        with torch.cuda.device(self.device):
            self.streams.h2d.wait_event(self.ours)
            try:
                for k, (rule, chunk) in enumerate(parts):
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


def chunks(whole: Update, buffer_bytes: int) -> Iterator[Update]:
    """Split an update into parts whose tensors fit into this many bytes."""
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
    """Bytes for this many elements, each tensor rounded up to the alignment of the next."""
    total = 0
    for name, tensor in update.tensors():
        count = absmax_numel(numel) if name == "absmax" else numel
        total += _rounded(count * tensor.itemsize)
    return total


def _placed(part: Update, buffer: torch.Tensor) -> Update:
    """Views of a buffer shaped like these tensors."""
    offset = 0

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        del name
        nonlocal offset
        size = tensor.numel() * tensor.itemsize
        span = buffer[offset : offset + size].view(tensor.dtype)
        offset += _rounded(size)
        return span

    return part.map(place)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
