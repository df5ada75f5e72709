"""Saved tensors that are offloaded to the host or a disk between a forward and its backward.

    OnHost     a copy in a leased buffer, from the device or from the disk
    OnDisk     a copy in the scratch file, passed from the forward to the backward

Only a step reads them, so their ranges are not mapped, unlike `DiskBuffer`s. Ranges are reused:
allocating one costs file system time, and new ranges are slower to write.

[Note: ownership] A forward may be abandoned and its values freed while threads still write them. So
a request references its buffer and its file range until it completes. Both are returned with the
last reference to them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch

from megacompile.errors import DiskError
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.background import OVER, Completion
from megacompile.runtime.device.pool import BufferPool, Lease, Reused
from megacompile.runtime.disk import Disk, FileSpan, Place, Way


class OnHost:
    """A tensor's copy in a leased buffer; the lease ends when this object is freed.

    Args:
        once: True if it is copied to the device only once, and its buffer is free afterwards.
    """

    def __init__(self, meta: TensorMeta, lease: Lease, *, once: bool = False) -> None:
        self.meta, self.lease, self.once = meta, lease, once

    @staticmethod
    def of(pool: BufferPool, value: torch.Tensor, queue: torch.cuda.Stream | None) -> OnHost:
        """Copy a tensor to the host on `queue`, which is the current stream; None on the CPU.

        Raises:
            HostMemoryError: too little host memory.
        """
        meta = TensorMeta.of(value)
        made = OnHost(meta, pool.lease(stored_bytes(meta)))
        buffer = made.lease.buffer
        assert buffer is not None
        if queue is not None:
            buffer.used.wait_on(queue)  # write after read
        made._memory().copy_(_elements(meta, value), non_blocking=True)
        made.lease.ready = buffer.used = _now(queue)
        return made

    def copy_to(self, buffer: torch.Tensor, queue: torch.cuda.Stream | None) -> torch.Tensor:
        """Copy it into `buffer` (shaped like `empty(meta)`) on `queue`, the current stream."""
        leased = self.lease.buffer
        assert leased is not None
        if queue is not None:
            self.lease.ready.wait_on(queue)  # read after write
        _elements(self.meta, buffer).copy_(self._memory(), non_blocking=True)
        leased.used = _now(queue)
        if self.once:
            self.lease.release()
        return buffer

    def back(self, queue: torch.cuda.Stream | None) -> torch.Tensor:
        """The tensor, copied to its device on `queue`, the current stream."""
        return self.copy_to(empty(self.meta), queue)

    def _memory(self) -> torch.Tensor:
        """The host copy, shaped like `_elements`."""
        flat = self.lease.bytes().view(self.meta.dtype)
        return flat if _extent(self.meta) is not None else flat.view(self.meta.shape)


def empty(meta: TensorMeta) -> torch.Tensor:
    """Allocate memory for such a tensor on its device."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)


def stored_bytes(meta: TensorMeta) -> int:
    """Bytes of a tensor's host copy."""
    extent = _extent(meta)
    return (math.prod(meta.shape) if extent is None else extent) * meta.dtype.itemsize


def _extent(meta: TensorMeta) -> int | None:
    """The number of elements from a tensor's first to its last in memory, if there are no gaps: at
    most its number of elements, and less if it is expanded."""
    if 0 in meta.shape:
        return 0
    extent = 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True))
    return extent if extent <= math.prod(meta.shape) else None


def _elements(meta: TensorMeta, tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is copied: its memory, or its values if the memory has gaps."""
    extent = _extent(meta)
    return tensor if extent is None else tensor.as_strided((extent,), (1,))


def _now(queue: torch.cuda.Stream | None) -> Completion:
    """The completion of the work issued on a stream so far."""
    if queue is None:
        return OVER
    event = torch.cuda.Event()
    event.record(queue)
    return Completion(event)


def converted(
    saved_values: Mapping[str, Any],
    name: str,
    elsewhere: Mapping[str, str],
    pool: BufferPool,
    queue: torch.cuda.Stream | None,
) -> Any:
    """The value that a backward reads as `name`, converted on the current stream from the copy that
    the forward saved: on the device, the host or the disk. Schedules of one graph save a value in
    different places if a backward was planned for gradients of other outputs.

    Args:
        elsewhere: name of a host or disk copy -> name of the value, in both schedules.
    """
    value = elsewhere.get(name, name)
    if value in saved_values:
        return OnHost.of(pool, saved_values[value], queue)
    copies = {value: copy for copy, value in elsewhere.items() if copy in saved_values}
    left = saved_values[copies[value]]
    if isinstance(left, OnDisk):
        left = left.read(left.what.replace("WRITE", "READ"))
        left.lease.wait()
    return left if name in elsewhere else left.back(queue)


class SavedDisk(Reused[Place]):
    """The saved tensors of one model on a disk, in reused ranges of the scratch file. Reads go into
    buffers of the pool."""

    def __init__(self, disk: Disk, pool: BufferPool) -> None:
        super().__init__()
        self.disk, self.pool = disk, pool

    def _make(self, size_bytes: int) -> Place:
        try:
            return self.disk.take(size_bytes)
        except DiskError:
            self.forget()  # free ranges of other sizes
            return self.disk.take(size_bytes)

    def _drop(self, piece: Place) -> None:
        self.disk.give_back(piece)


class OnDisk:
    """A tensor's copy on the disk. The write starts at creation; its buffer is free afterwards.

    Args:
        store: the ranges.
        source: the host copy to write once it is complete.
        what: for errors: "3WRITE_SAVED of 'layers.3'".

    Raises:
        DiskError: the disk is full, or this is a child of a fork.
    """

    place: Place | None = None

    def __init__(self, store: SavedDisk, source: OnHost, what: str) -> None:
        self.store, self.what, self.meta = store, what, source.meta
        lease = source.lease
        try:
            self.place = store.lend(store.disk.round_up(lease.size_bytes))
        except DiskError as error:
            raise DiskError(error.errno, f"{what}: {error}") from error
        before = functools.partial(self._filled, lease)  # it holds the range until it is written
        self.written = store.disk.request(Way.WRITE, self._spans(lease), what, before)
        self.written.at_end = lease.release
        self.written.begin()

    def _filled(self, lease: Lease) -> None:
        lease.wait()

    def _spans(self, lease: Lease) -> list[FileSpan]:
        """The whole pages of a buffer, which bypass the page cache, and the remaining bytes."""
        assert self.place is not None
        size, unit, at = lease.size_bytes, self.store.disk.alignment, self.place.at
        whole = size // unit * unit
        return [
            FileSpan(Place(at + begin, end - begin), functools.partial(_part, lease, begin, end))
            for begin, end in ((0, whole), (whole, size))
            if begin < end
        ]

    def read(self, what: str) -> OnHost:
        """Start a read into a buffer for one copy to the device.

        Args:
            what: for errors: "3READ_SAVED of 'layers.3'".

        Raises:
            DiskError: this is a child of a fork.
        """
        pool = self.store.pool
        lease = pool.lease(stored_bytes(self.meta), after=[self.written])
        pool.read(lease, self.store.disk.request(Way.READ, self._spans(lease), what))
        return OnHost(self.meta, lease, once=True)

    def __del__(self) -> None:
        if self.place is not None:
            self.store.give_back(self.place)


def _part(lease: Lease, begin: int, end: int) -> torch.Tensor:
    return lease.bytes()[begin:end]
