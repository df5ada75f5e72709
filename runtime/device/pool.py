"""Lends host memory and ranges of a disk from pools, and the saved tensors that are offloaded there
between a forward and its backward.

    BufferPool       saved tensors on the host: as many buffers as exist at once
    SavedDisk        saved tensors on the disk: ranges of the scratch file, not mapped. They are
                     reused: allocating one costs file system time, and new ones are slower to write
    BucketBuffers    buckets on a disk (`runtime/updates/staging.py`): a fixed number, in turn

[Note: host memory is reused] A finished use returns its buffer, which the next use of similar size
gets, so a step like the previous one locks no new memory. A buffer may be lent again while a device
copy from or to it is in flight: the next write into it waits for that copy's completion.

[Note: no deadlock] A disk thread that waited for a read's data or buffer could wait for a request
queued after its own. So the pool's thread waits, lease by lease in request order, and then starts
the read. What it waits for started earlier and needs no later lease of the same pool; otherwise
there are two pools (docs/decisions/0030-weights-on-a-disk.md).

[Note: ownership] A forward may be abandoned and its values freed while threads still write them. So
a request references its buffer and its file range until it completes. Both are returned with the
last reference to them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from megacompile.errors import DiskError
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.background import OVER, Background, Completion
from megacompile.runtime.device.buffers import HostBudget, HostBuffer, Wanted
from megacompile.runtime.disk import Disk, FileSpan, Place, Request, Way


@dataclass(slots=True, eq=False)
class Buffer:
    """Host memory, and the completion of the last device copy from or to it."""

    memory: HostBuffer
    size_bytes: int
    used: Completion = OVER


M = TypeVar("M", Buffer, Place)
_SLACK = 2  # a piece may exceed the request by this factor


class Reused(Generic[M]):
    """Reused pieces of memory, never more than the peak use in total."""

    def __init__(self) -> None:
        self._lent_bytes = 0
        self.peak_bytes = 0  # peak of lent bytes
        self._free: list[M] = []  # least recently used first
        self._returned: deque[M] = deque()  # filled by finalizers

    def _make(self, size_bytes: int) -> M:
        """Allocate a new piece of at least this many bytes."""
        raise NotImplementedError

    def _drop(self, piece: M) -> None:
        """Free a piece."""

    @property
    def lent_bytes(self) -> int:
        self._collect()
        return self._lent_bytes

    @property
    def held_bytes(self) -> int:
        return self.lent_bytes + sum(piece.size_bytes for piece in self._free)

    def lend(self, size_bytes: int) -> M:
        """Return a free piece of about that size, or a new one."""
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
        """Return a piece to the pool; callable from any thread and from finalizers."""
        self._returned.append(piece)

    def forget(self) -> None:
        self._collect()
        while self._free:
            self._drop(self._free.pop(0))

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._lent_bytes -= piece.size_bytes
            self._free.append(piece)


class Lease(Completion):
    """A buffer that is or will be lent to one use; complete once the buffer is filled. It may be
    larger than requested. A read into it starts once the work `after` is complete."""

    buffer: Buffer | None = None  # while it is lent
    ready: Completion = OVER  # a device copy, a disk read, or only the buffer itself

    def __init__(self, pool: Lender, size_bytes: int, after: Sequence[Completion] = ()) -> None:
        super().__init__()
        self.pool, self.size_bytes, self.after = pool, size_bytes, after

    def done(self) -> bool:
        return self.ready.done()

    def wait(self) -> None:
        """Wait until the buffer is filled; raises the error of its memory, write or read."""
        self.ready.wait()

    def bytes(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """The memory, or a part of it: (size_bytes,) uint8."""
        assert self.buffer is not None, "a buffer that is not lent"
        return self.buffer.memory.bytes(self.size_bytes)[begin:end]

    def release(self, used: Completion | None = None) -> None:
        """Return the buffer, which is free after `used`; idempotent, callable from any thread."""
        self.pool.take_back(self, used)

    def __del__(self) -> None:
        if self.buffer is not None:
            self.release()


class Lender:
    """Page-locked buffers for copies of a device, with a thread that starts reads into them."""

    def __init__(self, name: str, device: torch.device, budget: HostBudget) -> None:
        self.device, self.budget = device, budget
        self.pin = device.type == "cuda"  # True if the buffers are page-locked
        self._thread = Background(name)

    def take_back(self, lease: Lease, used: Completion | None) -> None:
        """Take a lease's buffer back; it is free after `used`."""
        raise NotImplementedError

    def _place(self, lease: Any) -> None:
        """Wait until a lease has a free buffer."""
        raise NotImplementedError

    def _new(self, size_bytes: int, what: str) -> Buffer:
        with torch.cuda.device(self.device) if self.pin else contextlib.nullcontext():
            return Buffer(self.budget.make(size_bytes, what, pin=self.pin), size_bytes)

    def _read(self, lease: Lease, request: Request) -> None:
        """Start a lease's read; runs in the pool's thread."""
        try:
            for work in lease.after:
                work.wait()
            self._place(lease)
        except BaseException as error:
            request.call_off(error)
        else:
            request.begin()
        lease.after = ()


class BufferPool(Lender, Reused[Buffer]):
    """Memory for offloaded saved tensors; a lease has its buffer at once."""

    def __init__(self, device: torch.device, budget: HostBudget | None = None) -> None:
        Lender.__init__(self, "megacompile-saved", device, budget or HostBudget())
        Reused.__init__(self)

    def read(self, lease: Lease, request: Request) -> None:
        """Start a read into a lease's buffer; see [Note: no deadlock]."""
        request.held = True
        lease.ready = request
        self._thread.submit(functools.partial(self._read, lease, request))

    def take_back(self, lease: Lease, used: Completion | None) -> None:
        # atomic, because several threads may return it
        buffer: Buffer | None = lease.__dict__.pop("buffer", None)
        if buffer is not None:
            buffer.used = buffer.used if used is None else used
            self.give_back(buffer)

    def wanted(self, sizes: Iterable[int]) -> list[Wanted]:
        """The buffer sizes that concurrent leases of these sizes will need; none if buffers exist
        already."""
        if not self.pin or self.held_bytes:
            return []
        return [Wanted(size_bytes, pin=True) for size_bytes in sizes]

    def _place(self, lease: Any) -> None:
        lease.buffer.used.wait()

    def _make(self, size_bytes: int) -> Buffer:
        return self._new(size_bytes, "offloaded activations")


class OnHost(Lease):
    """A tensor's copy in a leased buffer, from the device or from a disk. The lease ends when this
    object is freed; if it is copied to the device only `once`, after that copy. Raises
    HostMemoryError: too little host memory."""

    def __init__(
        self,
        pool: BufferPool,
        meta: TensorMeta,
        after: Sequence[Completion] = (),
        *,
        once: bool = False,
    ) -> None:
        super().__init__(pool, stored_bytes(meta), after)
        self.meta, self.once = meta, once
        self.buffer = pool.lend(self.size_bytes)

    @staticmethod
    def of(pool: BufferPool, value: torch.Tensor, queue: torch.cuda.Stream | None) -> OnHost:
        """Copy a tensor to the host on `queue`, which is the current stream; None on the CPU."""
        made = OnHost(pool, TensorMeta.of(value))
        buffer = made.buffer
        assert buffer is not None
        if queue is not None:
            buffer.used.wait_on(queue)  # write after read
        made._memory().copy_(_elements(made.meta, value), non_blocking=True)
        made.ready = buffer.used = completion_of(queue)
        return made

    def copy_to(self, buffer: torch.Tensor, queue: torch.cuda.Stream | None) -> torch.Tensor:
        """Copy it into `buffer` (shaped like `empty(meta)`) on `queue`, the current stream."""
        assert self.buffer is not None
        if queue is not None:
            self.ready.wait_on(queue)  # read after write
        _elements(self.meta, buffer).copy_(self._memory(), non_blocking=True)
        self.buffer.used = completion_of(queue)
        if self.once:
            self.release()
        return buffer

    def back(self, queue: torch.cuda.Stream | None) -> torch.Tensor:
        """The tensor, copied to its device on `queue`, the current stream."""
        return self.copy_to(empty(self.meta), queue)

    def _memory(self) -> torch.Tensor:
        flat = self.bytes().view(self.meta.dtype)
        return flat if _extent(self.meta) is not None else flat.view(self.meta.shape)


def empty(meta: TensorMeta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)


def stored_bytes(meta: TensorMeta) -> int:
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


def completion_of(queue: torch.cuda.Stream | None) -> Completion:
    """The completion of the work issued on a stream so far; None: the CPU."""
    return OVER if queue is None else Completion(queue.record_event())


def converted(
    saved_values: Mapping[str, Any],
    name: str,
    elsewhere: Mapping[str, str],
    pool: BufferPool,
    queue: torch.cuda.Stream | None,
) -> Any:
    """The value that a backward reads as `name`, converted on the current stream from the copy that
    the forward saved: on the device, the host or the disk. Schedules of one graph save a value in
    different places if a backward was planned for gradients of other outputs. `elsewhere` maps the
    name of a host or disk copy to the name of the value, in both schedules."""
    value = elsewhere.get(name, name)
    if value in saved_values:
        return OnHost.of(pool, saved_values[value], queue)
    copies = {value: copy for copy, value in elsewhere.items() if copy in saved_values}
    left = saved_values[copies[value]]
    if isinstance(left, OnDisk):
        left = left.read(left.what.replace("WRITE", "READ"))
        left.wait()
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
    `what` names it in errors: "3WRITE_SAVED of 'layers.3'". Raises DiskError: the disk is full, or
    this is a child of a fork."""

    place: Place | None = None

    def __init__(self, store: SavedDisk, source: OnHost, what: str) -> None:
        self.store, self.what, self.meta = store, what, source.meta
        try:
            self.place = store.lend(store.disk.round_up(source.size_bytes))
        except DiskError as error:
            raise DiskError(error.errno, f"{what}: {error}") from error
        before = functools.partial(self._filled, source)  # it holds the range until it is written
        self.written = store.disk.request(Way.WRITE, self._spans(source), what, before)
        self.written.at_end = source.release
        self.written.begin()

    def _filled(self, source: OnHost) -> None:
        source.wait()

    def _spans(self, lease: Lease) -> list[FileSpan]:
        """The whole pages of a buffer, which bypass the page cache, and the remaining bytes."""
        assert self.place is not None
        size, unit, at = lease.size_bytes, self.store.disk.alignment, self.place.at
        whole = size // unit * unit
        return [
            FileSpan(Place(at + begin, end - begin), functools.partial(lease.bytes, begin, end))
            for begin, end in ((0, whole), (whole, size))
            if begin < end
        ]

    def read(self, what: str) -> OnHost:
        """Start a read into a buffer for one copy to the device; `what` is for errors."""
        pool = self.store.pool
        back = OnHost(pool, self.meta, [self.written], once=True)
        pool.read(back, self.store.disk.request(Way.READ, self._spans(back), what))
        return back

    def __del__(self) -> None:
        if self.place is not None:
            self.store.give_back(self.place)
