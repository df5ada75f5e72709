"""Pools of page-locked host memory.

    BufferPool       offloaded saved tensors: as many buffers as exist at once BucketBuffers
    buckets on a disk (`runtime/updates/leases.py`): a fixed number, in turn

[Note: host memory is reused]
Page-locking a gigabyte takes 0.2 s, so buffers are reused: a finished use returns its buffer to the
pool, which lends it to the next use of similar size. A step like the previous one locks no new
memory. A `BufferPool` never holds more than the peak use in total.

A buffer may be lent again while a device copy from or to it is in flight. It records the completion
of the last copy, and the next write into the buffer waits for it.

[Note: no deadlock] A disk read starts once its data is written and its buffer is free. A disk
thread that waited for either could wait for a request queued after its own. So the pool's thread
waits, lease by lease in request order, and then starts the read. The work that a lease waits for
started earlier and needs no later lease of the same pool: a holder returns its buffer without
acquiring another. If that does not hold, two pools with separate threads are used: an update holds
its buffer across later prefetches.
"""

from __future__ import annotations

import functools
import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from megacompile.errors import HostMemoryError
from megacompile.host_memory import MARGIN_BYTES, available_bytes
from megacompile.runtime.device.background import OVER, Background, Completion
from megacompile.runtime.device.buffers import HostBuffer, Wanted
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.disk.transfers import Request
from megacompile.text import format_bytes

# Reused pieces of memory, so that each is allocated once.


class Sized(Protocol):
    """A piece of memory."""

    @property
    def size_bytes(self) -> int: ...


M = TypeVar("M", bound=Sized)

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
        """Bytes in use."""
        self._collect()
        return self._lent_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all pieces, lent or not."""
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
        """Free all pieces that are not lent."""
        self._collect()
        while self._free:
            self._drop(self._free.pop(0))

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._lent_bytes -= piece.size_bytes
            self._free.append(piece)


@dataclass(slots=True, eq=False)
class Buffer:
    """Host memory, and the completion of the last device copy from or to it."""

    memory: HostBuffer
    size_bytes: int
    used: Completion = OVER


class Lease(Completion):
    """A buffer that is or will be lent to one use; complete once the buffer is filled.

    Args:
        pool: the pool that takes the buffer back.
        size_bytes: the requested size; the buffer may be larger.
        after: work that must complete before a read into the buffer starts.
    """

    buffer: Buffer | None = None  # while it is lent
    ready: Completion = OVER  # a device copy, a disk read, or only the buffer itself

    def __init__(self, pool: Lender, size_bytes: int, after: Sequence[Completion] = ()) -> None:
        super().__init__()
        self.pool = pool
        self.size_bytes = size_bytes
        self.after = after

    def done(self) -> bool:
        return self.ready.done()

    def wait(self) -> None:
        """Wait until the buffer is filled.

        Raises:
            HostMemoryError: no memory for the buffer.
            DiskError: its data could not be written or read.
        """
        self.ready.wait()

    def bytes(self) -> torch.Tensor:
        """The memory: (size_bytes,) uint8."""
        assert self.buffer is not None, "a buffer that is not lent"
        return self.buffer.memory.bytes(self.size_bytes)

    def release(self, used: Completion | None = None) -> None:
        """Return the buffer, which is free after `used`; idempotent, callable from any thread."""
        self.pool.take_back(self, used)

    def __del__(self) -> None:
        if self.buffer is not None:
            self.release()


class Lender:
    """Page-locked buffers, with a thread that starts reads into them.

    Args:
        name: the thread's name.
        device: the device that copies to and from them; they are page-locked for a GPU.
        budget: allocates them.
    """

    def __init__(self, name: str, device: torch.device, budget: HostBudget) -> None:
        self.device = device
        self.budget = budget
        self._thread = Background(name)

    def take_back(self, lease: Lease, used: Completion | None) -> None:
        """Take a lease's buffer back; it is free after `used`."""
        raise NotImplementedError

    def _new(self, size_bytes: int, what: str) -> Buffer:
        pin = self.device.type == "cuda"
        with torch.cuda.device(self.device) if pin else nullcontext():
            return Buffer(self.budget.make(size_bytes, what, pin=pin), size_bytes)


class BufferPool(Lender, Reused[Buffer]):
    """Memory for offloaded saved tensors; a lease has its buffer at once."""

    def __init__(self, device: torch.device, budget: HostBudget | None = None) -> None:
        Lender.__init__(self, "megacompile-saved", device, budget or HostBudget())
        Reused.__init__(self)

    def lease(self, size_bytes: int, after: Sequence[Completion] = ()) -> Lease:
        """Lend a buffer; before writing, the user waits for its `used`.

        Raises:
            HostMemoryError: too little host memory.
        """
        lease = Lease(self, size_bytes, after)
        lease.buffer = self.lend(size_bytes)
        return lease

    def read(self, lease: Lease, request: Request) -> None:
        """Start a read into a lease's buffer; see [Note: no deadlock]."""
        buffer = lease.buffer
        assert buffer is not None
        request.held = True
        lease.ready = request
        self._thread.submit(functools.partial(_read, lease, buffer, request))

    def take_back(self, lease: Lease, used: Completion | None) -> None:
        # atomic, because several threads may return it
        buffer: Buffer | None = lease.__dict__.pop("buffer", None)
        if buffer is not None:
            buffer.used = buffer.used if used is None else used
            self.give_back(buffer)

    def wanted(self, sizes: Iterable[int]) -> list[Wanted]:
        """The buffer sizes that concurrent leases of these sizes will need; none if buffers exist
        already."""
        if self.device.type != "cuda" or self.held_bytes:
            return []
        return [Wanted(size_bytes, pin=True) for size_bytes in sizes]

    def _make(self, size_bytes: int) -> Buffer:
        pin = self.device.type == "cuda"
        ready = self.budget.ready(size_bytes, pin=pin)
        if ready is not None:
            return Buffer(ready, size_bytes)
        free = available_bytes()
        if size_bytes > mmap.PAGESIZE and size_bytes + MARGIN_BYTES > free:
            self.budget.drop_preallocated()  # frees buffers that may never be requested
            free = available_bytes()
        if size_bytes > mmap.PAGESIZE and size_bytes + MARGIN_BYTES > free:
            raise HostMemoryError(
                f"offloading activations: {format_bytes(size_bytes)} more of host memory needed, "
                f"in addition to {format_bytes(self.lent_bytes)} in use, and "
                f"{format_bytes(max(free - MARGIN_BYTES, 0))} are available; use "
                "activations='recompute', or a smaller batch"
            )
        return self._new(size_bytes, "offloaded tensors")


def _read(lease: Lease, buffer: Buffer, request: Request) -> None:
    """Runs in the pool's thread."""
    try:
        for work in lease.after:
            work.wait()
        buffer.used.wait()
    except BaseException as error:
        request.call_off(error)
    else:
        request.begin()
    lease.after = ()
