"""Values that wait on the host between a forward and its backward, and the memory they wait in.

[Note: host memory is reused]
To page-lock a gigabyte takes 0.2 s, so buffers live on: a value that dies returns its buffer
to the pool, which lends it to the next value of about that size. A step that is like the one before
locks nothing. All in all the pool holds no more than was ever in use at once.

A buffer may be lent again while a copy from it to the device is on its way, or one to it that
is never fetched. It keeps their events, and whatever fills the buffer next waits for them.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from megacompile.errors import HostMemoryError
from megacompile.host_memory import MARGIN_BYTES, available_bytes
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.buffers import HostBuffer, Wanted
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.text import format_bytes

# Pieces of memory lent to one user after another, so that each is allocated once.


class Sized(Protocol):
    """A piece of memory."""

    @property
    def size_bytes(self) -> int: ...


M = TypeVar("M", bound=Sized)

_SLACK = 2  # a piece may be this many times larger than what it is lent to


class Reused(Generic[M]):
    """Pieces of memory; all in all no more than was ever in use at once."""

    def __init__(self) -> None:
        self._lent_bytes = 0
        self.peak_bytes = 0  # that were lent at once
        self._free: list[M] = []  # the longest unused first
        self._returned: deque[M] = deque()  # filled wherever a user dies

    def _make(self, size_bytes: int) -> M:
        """A new piece of at least so many bytes."""
        raise NotImplementedError

    def _drop(self, piece: M) -> None:
        """One is not needed any more."""

    @property
    def lent_bytes(self) -> int:
        """Bytes in use."""
        self._collect()
        return self._lent_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all pieces, lent or not."""
        return self.lent_bytes + sum(piece.size_bytes for piece in self._free)

    def lend(self, size_bytes: int) -> M:
        """One that is free, of about that size, or a new one."""
        self._collect()
        fitting = [p for p in self._free if size_bytes <= p.size_bytes <= _SLACK * size_bytes]
        if fitting:
            piece = min(fitting, key=lambda p: p.size_bytes)
            self._free.remove(piece)
        else:
            limit = max(self.peak_bytes, self._lent_bytes + size_bytes)
            while self._free and self.held_bytes + size_bytes > limit:
                self._drop(self._free.pop(0))
            piece = self._make(size_bytes)
        self._lent_bytes += piece.size_bytes
        self.peak_bytes = max(self.peak_bytes, self._lent_bytes)
        return piece

    def give_back(self, piece: M) -> None:
        """It is not used any more; from any thread, and from a finalizer."""
        self._returned.append(piece)

    def forget(self) -> None:
        """Drop what is not lent."""
        self._collect()
        while self._free:
            self._drop(self._free.pop(0))

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._lent_bytes -= piece.size_bytes
            self._free.append(piece)


@dataclass(slots=True, eq=False)
class PooledBuffer:
    """Host memory, and what still works on it."""

    memory: HostBuffer
    size_bytes: int
    read: torch.cuda.Event | None = None  # after the last copy from it to the device
    filled: torch.cuda.Event | None = None  # after the last copy to it from there

    def events(self) -> Iterator[torch.cuda.Event]:
        """The work that is still done on it."""
        return (event for event in (self.read, self.filled) if event is not None)


class OnHost:
    """A tensor's copy on the host; when it dies, its memory goes back to the pool.

    Attributes:
        meta: shape, dtype, strides and device of the tensor.
        ready: after the copy to the host; None on the CPU.
    """

    ready: torch.cuda.Event | None = None
    buffer: PooledBuffer

    def __init__(self, pool: HostPool, meta: TensorMeta) -> None:
        self.meta = meta
        self.pool = pool

    def store(self, value: torch.Tensor, queue: torch.cuda.Stream | None) -> OnHost:
        """Copy the tensor here on `queue`, which is the current stream."""
        self.buffer = self.pool.lend(self.size_bytes)
        if queue is not None:
            for event in self.buffer.events():
                queue.wait_event(event)  # write after read
        self._memory().copy_(self._elements(value), non_blocking=True)
        self.buffer.read, self.buffer.filled = None, _event(queue)
        self.ready = self.buffer.filled
        return self

    def release(self) -> None:
        """Give its memory back."""
        buffer = self.__dict__.pop("buffer", None)  # at once: several threads may come here
        if buffer is not None:
            self.pool.give_back(buffer)

    __del__ = release

    def empty(self) -> torch.Tensor:
        """A buffer for the tensor on its device, of the same strides."""
        return empty(self.meta)

    def copy_to(self, buffer: torch.Tensor, queue: torch.cuda.Stream | None) -> torch.Tensor:
        """Copy it into `buffer`, on `queue`, which is the current stream and after `ready`."""
        self._elements(buffer).copy_(self._memory(), non_blocking=True)
        self.buffer.read = _event(queue)
        return buffer

    def to_host(self) -> OnHost:
        """It is there."""
        return self

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
    def size_bytes(self) -> int:
        """The memory that is copied."""
        numel = self._extent if self._dense else math.prod(self.meta.shape)
        return numel * self.meta.dtype.itemsize

    def _elements(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor like this one that is copied: all its memory, or what is used."""
        return tensor.as_strided((self._extent,), (1,)) if self._dense else tensor

    def bytes(self, begin: int, end: int) -> torch.Tensor:
        """Some bytes of it, as a disk reads and writes them: flat, uint8."""
        return self.buffer.memory.bytes(self.size_bytes)[begin:end]

    def _memory(self) -> torch.Tensor:
        """The copy on the host, in the shape of `_elements`."""
        flat = self.buffer.memory.bytes(self.size_bytes).view(self.meta.dtype)
        return flat if self._dense else flat.view(self.meta.shape)


def empty(meta: TensorMeta) -> torch.Tensor:
    """Memory for a tensor like this on its device."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)


def taken(
    saved_values: Mapping[str, Any],
    name: str,
    elsewhere: Mapping[str, str],
    pool: HostPool,
    queue: torch.cuda.Stream | None,
) -> Any:
    """The value that a backward takes as `name`, made on the current stream where the forward left
    another.

    Schedules of one graph put the same saved values on the host and on the disk, so this is a
    look-up; a backward that was planned otherwise (for other outputs' gradients) is slower, not
    wrong.

    Args:
        elsewhere: the names of values, by those of their copies on the host or on a disk, in both
            schedules.
    """
    if name in saved_values:
        return saved_values[name]
    value = elsewhere.get(name, name)
    if value in saved_values:
        return pool.store(saved_values[value], queue)
    copies = {value: copy for copy, value in elsewhere.items() if copy in saved_values}
    left = saved_values[copies[value]].to_host()
    return left if name in elsewhere else left.back(queue)


class HostPool(Reused[PooledBuffer]):
    """Page-locked host memory that is lent to one activation after the other.

    Code that writes to a lent buffer waits for its events first.
    """

    def __init__(self, *, pin: bool, budget: HostBudget | None = None) -> None:
        super().__init__()
        self.pin = pin
        self.budget = budget or HostBudget()  # makes its memory

    def store(self, value: torch.Tensor, queue: torch.cuda.Stream | None) -> OnHost:
        """Copy a tensor to the host on `queue`, which is the current stream.

        Raises:
            HostMemoryError: there is no host memory left for it.
        """
        return OnHost(self, TensorMeta.of(value)).store(value, queue)

    def wanted(self, metas: Iterable[TensorMeta]) -> list[Wanted]:
        """The memory that tensors will ask for which are here at the same time; none where there
        is some already."""
        if not self.pin or self.held_bytes:
            return []
        sizes = [OnHost(self, meta).size_bytes for meta in metas]
        return [Wanted(size_bytes, pin=True) for size_bytes in sizes]

    def _make(self, size_bytes: int) -> PooledBuffer:
        ready = self.budget.ready(size_bytes, pin=self.pin)
        if ready is not None:
            return PooledBuffer(ready, size_bytes)
        free = available_bytes()
        if size_bytes > mmap.PAGESIZE and size_bytes + MARGIN_BYTES > free:
            self.budget.drop_preallocated()  # what may never be asked for is in the way
            free = available_bytes()
        if size_bytes > mmap.PAGESIZE and size_bytes + MARGIN_BYTES > free:
            raise HostMemoryError(
                f"offloading activations: {format_bytes(size_bytes)} more are needed on the host, "
                f"beside {format_bytes(self.lent_bytes)} that wait there, and "
                f"{format_bytes(max(free - MARGIN_BYTES, 0))} are available; use "
                "activations='recompute', or a smaller batch"
            )
        made = self.budget.make(size_bytes, "what waits for its backward", pin=self.pin)
        return PooledBuffer(made, size_bytes)


def _event(queue: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    if queue is None:
        return None
    event = torch.cuda.Event()
    event.record(queue)
    return event
