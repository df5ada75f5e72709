"""What waits on the host between a forward and its backward, and the memory it waits in.

[Note: host memory is reused]
To page-lock a gigabyte takes 0.2 s, so buffers live on: a value that dies gives its buffer back to
the pool, which lends it to the next value of about that size. A step that is like the one before
locks nothing. All in all the pool holds no more than was ever in use at once.

A buffer may be lent again while a copy from it to the device is on its way. The pool keeps the
event of that copy, and the stream that fills the buffer next waits for it (write after read). What
was copied to it, but never fetched, was copied on the stream that fills it next: in order.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megacompile.errors import HostMemoryError
from megacompile.host_memory import MARGIN_BYTES, available_bytes
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.text import format_bytes

_SLACK = 2  # a buffer may be this many times larger than what it is lent to


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: HostBuffer
    size_bytes: int
    read: torch.cuda.Event | None = None  # behind the last copy from it to the device


class OnHost:
    """A tensor's copy on the host; when it dies, its memory goes back to the pool.

    Attributes:
        meta: shape, dtype, strides and device of the tensor.
        ready: behind the copy to the host; None on the CPU.
    """

    def __init__(
        self, pool: HostPool, value: torch.Tensor, queue: torch.cuda.Stream | None
    ) -> None:
        self.meta = TensorMeta.of(value)
        self.pool = pool
        self.buffer = pool._lend(self._size_bytes, queue)
        self._memory().copy_(self._elements(value), non_blocking=True)
        self.ready = _event(queue)

    def __del__(self) -> None:
        if hasattr(self, "buffer"):
            self.pool._returned.append(self.buffer)

    def empty(self) -> torch.Tensor:
        """A buffer for the tensor on its device, of the same strides."""
        meta = self.meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)

    def copy_to(self, buffer: torch.Tensor, queue: torch.cuda.Stream | None) -> torch.Tensor:
        """Copy it into `buffer`, on `queue`, which is the current stream and behind `ready`."""
        self._elements(buffer).copy_(self._memory(), non_blocking=True)
        self.buffer.read = _event(queue)
        return buffer

    def back(self, queue: torch.cuda.Stream | None) -> torch.Tensor:
        """The tensor, copied to its device on `queue`, which is the current stream."""
        if queue is not None and self.ready is not None:
            queue.wait_event(self.ready)  # read after write
        return self.copy_to(self.empty(), queue)

    @property
    def _extent(self) -> int:
        """Elements from a tensor's first to its last in memory."""
        meta = self.meta
        if 0 in meta.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True))

    @property
    def _dense(self) -> bool:
        """Is its memory free of gaps? That of an expanded tensor is smaller than its shape."""
        return self._extent <= math.prod(self.meta.shape)

    @property
    def _size_bytes(self) -> int:
        numel = self._extent if self._dense else math.prod(self.meta.shape)
        return numel * self.meta.dtype.itemsize

    def _elements(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is copied of a tensor that looks like this one: all its memory, or what is used."""
        return tensor.as_strided((self._extent,), (1,)) if self._dense else tensor

    def _memory(self) -> torch.Tensor:
        """The copy on the host, in the shape of `_elements`."""
        flat = self.buffer.memory.bytes(self._size_bytes).view(self.meta.dtype)
        return flat if self._dense else flat.view(self.meta.shape)


def taken(
    saved_values: Mapping[str, Any],
    name: str,
    on_host: Mapping[str, str],
    pool: HostPool,
    queue: torch.cuda.Stream | None,
) -> Any:
    """What a backward takes as `name`, made on the current stream where the forward left another.

    Schedules of one graph put the same saved values on the host, so this is a look-up; a backward
    that was planned otherwise (for other outputs' gradients) is slower, not wrong.

    Args:
        on_host: the names of values, by those of their copies on the host, in both schedules.
    """
    if name in saved_values:
        return saved_values[name]
    if name in on_host:
        return pool.store(saved_values[on_host[name]], queue)
    copies = {value: copy for copy, value in on_host.items() if copy in saved_values}
    return saved_values[copies[name]].back(queue)


class HostPool:
    """Page-locked host memory that is lent to one activation after the other."""

    def __init__(self, *, pin: bool) -> None:
        self.pin = pin
        self.budget = HostBudget()  # makes its memory
        self.lent_bytes = 0
        self.peak_bytes = 0  # that were lent at once
        self._free: list[_Buffer] = []  # the longest unused first
        self._returned: deque[_Buffer] = deque()  # filled wherever an `OnHost` dies

    @property
    def held_bytes(self) -> int:
        """Host memory of the pool, lent or not."""
        self._collect()
        return self.lent_bytes + sum(buffer.size_bytes for buffer in self._free)

    def store(self, value: torch.Tensor, queue: torch.cuda.Stream | None) -> OnHost:
        """Copy a tensor to the host on `queue`, which is the current stream.

        Raises:
            HostMemoryError: there is no host memory left for it.
        """
        return OnHost(self, value, queue)

    def forget(self) -> None:
        """Give back what is not lent."""
        self._collect()
        self._free.clear()

    def _lend(self, size_bytes: int, queue: torch.cuda.Stream | None) -> _Buffer:
        self._collect()
        fitting = [b for b in self._free if size_bytes <= b.size_bytes <= _SLACK * size_bytes]
        if fitting:
            buffer = min(fitting, key=lambda b: b.size_bytes)
            self._free.remove(buffer)
        else:
            buffer = self._make(size_bytes)
        self.lent_bytes += buffer.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
        if buffer.read is not None and queue is not None:
            queue.wait_event(buffer.read)  # write after read
        buffer.read = None
        return buffer

    def _make(self, size_bytes: int) -> _Buffer:
        limit = max(self.peak_bytes, self.lent_bytes + size_bytes)
        while self._free and self.held_bytes + size_bytes > limit:
            self._free.pop(0)
        free = available_bytes()
        if size_bytes > mmap.PAGESIZE and size_bytes + MARGIN_BYTES > free:
            raise HostMemoryError(
                f"offloading activations: {format_bytes(size_bytes)} more are needed on the host, "
                f"beside {format_bytes(self.lent_bytes)} that wait there, and "
                f"{format_bytes(max(free - MARGIN_BYTES, 0))} are available; use "
                "activations='recompute', or a smaller batch"
            )
        made = self.budget.make(size_bytes, "what waits for its backward", pin=self.pin)
        return _Buffer(made, size_bytes)

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self.lent_bytes -= buffer.size_bytes
            self._free.append(buffer)


def _event(queue: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if queue is None:
        return None
    event = torch.cuda.Event()
    event.record(queue)
    return event
