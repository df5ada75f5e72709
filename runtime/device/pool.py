"""Page-locked host memory that is lent to one use after another.

    BufferPool       tensors that wait for their backward: as many buffers as there are at once
    BucketBuffers    buckets on a disk (`runtime/updates/leases.py`): so many, each in its turn

[Note: host memory is reused]
To page-lock a gigabyte takes 0.2 s, so buffers live on: a use that ends returns its buffer to the
pool, which lends it to the next use of about that size. A step that is like the one before locks
nothing. All in all a `BufferPool` holds no more than was ever in use at once.

A buffer may be lent again while a copy of the device from it or to it is on its way. It keeps the
end of the last one, and what fills the buffer next waits for that.

[Note: no deadlock] A read of a disk begins when what it reads is written and its buffer is free. A
thread of the disk that waited for either could wait for a request that is queued after its own. So
the thread of a pool waits, for one lease after another, in the order in which they were asked for,
and begins the read then. What a lease waits for was begun before it, and needs no later lease of
the same pool: a holder gives its buffer back without another one. Where that is not so, there are
two pools, with a thread each: an update holds its buffer over later prefetches.
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
class Buffer:
    """Host memory, and the end of the last copy of the device from it or to it."""

    memory: HostBuffer
    size_bytes: int
    used: Completion = OVER


class Lease(Completion):
    """A buffer that is lent to one use, or will be; it is over when the buffer is filled.

    Args:
        pool: that it goes back to.
        size_bytes: that it needs; the buffer may be larger.
        after: what must be over before a read into it begins.
    """

    buffer: Buffer | None = None  # while it is lent
    ready: Completion = OVER  # a copy from the device, a read of a disk, or nothing but the buffer

    def __init__(self, pool: Lender, size_bytes: int, after: Sequence[Completion] = ()) -> None:
        super().__init__()
        self.pool = pool
        self.size_bytes = size_bytes
        self.after = after

    def done(self) -> bool:
        return self.ready.done()

    def wait(self) -> None:
        """Wait until it is filled.

        Raises:
            HostMemoryError: there is no memory for it.
            DiskError: what it reads could not be written, or read.
        """
        self.ready.wait()

    def bytes(self) -> torch.Tensor:
        """The memory: (size_bytes,) uint8."""
        assert self.buffer is not None, "a buffer that is not lent"
        return self.buffer.memory.bytes(self.size_bytes)

    def release(self, used: Completion | None = None) -> None:
        """Give the buffer back, which is free after `used`; in any thread, any number of times."""
        self.pool.take_back(self, used)

    def __del__(self) -> None:
        if self.buffer is not None:
            self.release()


class Lender:
    """Page-locked buffers; a thread begins reads into them.

    Args:
        name: of the thread.
        device: that copies to and from them; they are page-locked for a GPU.
        budget: makes them.
    """

    def __init__(self, name: str, device: torch.device, budget: HostBudget) -> None:
        self.device = device
        self.budget = budget
        self._thread = Background(name)

    def take_back(self, lease: Lease, used: Completion | None) -> None:
        """A lease is not used any more, after `used`."""
        raise NotImplementedError

    def _new(self, size_bytes: int, what: str) -> Buffer:
        pin = self.device.type == "cuda"
        with torch.cuda.device(self.device) if pin else nullcontext():
            return Buffer(self.budget.make(size_bytes, what, pin=pin), size_bytes)


class BufferPool(Lender, Reused[Buffer]):
    """Memory for tensors that wait for their backward; a lease of it has its buffer at once."""

    def __init__(self, device: torch.device, budget: HostBudget | None = None) -> None:
        Lender.__init__(self, "megacompile-saved", device, budget or HostBudget())
        Reused.__init__(self)

    def lease(self, size_bytes: int, after: Sequence[Completion] = ()) -> Lease:
        """A buffer, whose `used` its user waits for before it writes there.

        Raises:
            HostMemoryError: there is no host memory left for it.
        """
        lease = Lease(self, size_bytes, after)
        lease.buffer = self.lend(size_bytes)
        return lease

    def read(self, lease: Lease, request: Request) -> None:
        """Begin a read into a lease's buffer; see [Note: no deadlock]."""
        buffer = lease.buffer
        assert buffer is not None
        request.held = True
        lease.ready = request
        self._thread.submit(functools.partial(_read, lease, buffer, request))

    def take_back(self, lease: Lease, used: Completion | None) -> None:
        buffer: Buffer | None = lease.__dict__.pop("buffer", None)  # several threads may come here
        if buffer is not None:
            buffer.used = buffer.used if used is None else used
            self.give_back(buffer)

    def wanted(self, sizes: Iterable[int]) -> list[Wanted]:
        """The memory that leases of these sizes will take which are there at the same time; none
        where there is some already."""
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
            self.budget.drop_preallocated()  # what may never be asked for is in the way
            free = available_bytes()
        if size_bytes > mmap.PAGESIZE and size_bytes + MARGIN_BYTES > free:
            raise HostMemoryError(
                f"offloading activations: {format_bytes(size_bytes)} more are needed on the host, "
                f"beside {format_bytes(self.lent_bytes)} that wait there, and "
                f"{format_bytes(max(free - MARGIN_BYTES, 0))} are available; use "
                "activations='recompute', or a smaller batch"
            )
        return self._new(size_bytes, "what waits for its backward")


def _read(lease: Lease, buffer: Buffer, request: Request) -> None:
    """By the thread of the pool."""
    try:
        for work in lease.after:
            work.wait()
        buffer.used.wait()
    except BaseException as error:
        request.call_off(error)
    else:
        request.begin()
    lease.after = ()
