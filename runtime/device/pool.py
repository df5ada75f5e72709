"""Allocates host memory within a limit, and lends it from pools.

    BufferPool       offloaded saved tensors: as many buffers as exist at once
    BucketBuffers    buckets on a disk (`runtime/updates/staging.py`): a fixed number, in turn

[Note: host memory is reused] A finished use returns its buffer to the pool, which lends it to the
next use of similar size, so a step like the previous one locks no new memory. A `BufferPool` never
holds more than the peak use in total. A buffer may be lent again while a device copy from or to it
is in flight: the next write into it waits for the completion of the last copy, which it records.

[Note: buffers allocated in advance] Allocating and locking a gigabyte takes 0.3 s: for 40 GiB of
gradients and states, 9 s of a first step of 65 s. So a thread allocates buffers in advance. A
caller takes a ready buffer of its size, or waits for one that is being allocated.

[Note: no deadlock] A disk read starts once its data is written and its buffer is free. A disk
thread that waited for either could wait for a request queued after its own. So the pool's thread
waits, lease by lease in request order, and then starts the read. The work that a lease waits for
started earlier and needs no later lease of the same pool: a holder returns its buffer without
acquiring another. If that does not hold, two pools with separate threads are used: an update holds
its buffer across later prefetches.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megacompile import numa
from megacompile.errors import HostMemoryError
from megacompile.host_memory import check_host_memory
from megacompile.progress import phase
from megacompile.runtime.device.background import (
    OVER,
    Background,
    Completion,
    WeakIdSet,
    fulfil,
    is_over,
)
from megacompile.runtime.device.buffers import HostBuffer, Wanted
from megacompile.runtime.disk import Place, Request
from megacompile.text import format_bytes


class HostBudget:
    """Allocates a model's host buffers, in any thread, and keeps their total within a limit.

    Args:
        limit_bytes: limit of all live buffers together; None: the machine's memory.
        node: the NUMA node near the device that copies from and to them; None: any.
    """

    def __init__(self, limit_bytes: int | None = None, node: numa.Node | None = None) -> None:
        self.limit_bytes, self.node = limit_bytes, node
        self._sizes: dict[int, int] = {}  # of live buffers; a finalizer may run at any time
        self._buffers: WeakIdSet[HostBuffer] = WeakIdSet()
        self._next = itertools.count()
        self._ahead: dict[tuple[int, bool], deque[Future[HostBuffer]]] = {}  # being allocated
        self._maker = Background("megacompile-host-memory")

    @property
    def held_bytes(self) -> int:
        """Bytes of all live buffers."""
        return sum(list(self._sizes.values()))

    @property
    def locked_bytes(self) -> int:
        """Bytes of the live page-locked buffers."""
        return sum(len(buffer) for buffer in self._buffers if buffer.locked)

    def make(self, size_bytes: int, what: str, *, pin: bool, touch: bool = True) -> HostBuffer:
        """Return a new buffer, or one allocated in advance.

        Args:
            what: names the purpose of the buffer in errors.

        Raises:
            HostMemoryError: too little memory, or the limit is reached. Without this check the
                kernel would kill the process when the memory is touched.
        """
        if touch and (ready := self._ready(size_bytes, pin=pin)) is not None:
            return ready
        try:
            return self._new(size_bytes, what, pin=pin, touch=touch)
        except HostMemoryError:
            if not self._ahead:
                raise
        self.drop_preallocated()  # they may never be requested
        self.await_made()
        return self._new(size_bytes, what, pin=pin, touch=touch)

    def _ready(self, size_bytes: int, *, pin: bool) -> HostBuffer | None:
        """Return a buffer that was allocated in advance or is being allocated."""
        try:
            future = self._ahead[size_bytes, pin].popleft()
        except (KeyError, IndexError):  # another thread may have freed it
            return None
        with phase("allocating host memory"):
            if future.cancel() or future.exception() is not None:
                return None
            return future.result()

    def preallocate(self, wanted: Iterable[Wanted], what: str, device: torch.device) -> None:
        """Allocate buffers in the background for copies of `device`; `make` returns them for
        matching requests. `what` names their purpose in errors."""
        budget = weakref.ref(self)

        def make(each: Wanted, alive: HostBudget) -> HostBuffer:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                buffer = alive._new(each.size_bytes, what, pin=each.pin, touch=True)
                if each.lock:
                    buffer.lock()
            return buffer

        def work(each: Wanted, future: Future[HostBuffer]) -> None:
            if (alive := budget()) is None or is_over():
                future.cancel()
            else:  # the caller that requests the buffer gets the error
                fulfil(future, functools.partial(make, each, alive))

        for each in wanted:
            future: Future[HostBuffer] = Future()
            self._ahead.setdefault((each.size_bytes, each.pin), deque()).append(future)
            self._maker.submit(functools.partial(work, each, future))

    def drop_preallocated(self) -> None:
        """Free the buffers that were allocated in advance but never requested."""
        while self._ahead:
            _, futures = self._ahead.popitem()
            while futures:
                futures.popleft().cancel()

    def await_made(self) -> None:
        """Wait until no buffer is being allocated. Dropped buffers have no memory then."""
        self._maker.call(lambda: None)

    def _new(self, size_bytes: int, what: str, *, pin: bool, touch: bool) -> HostBuffer:
        key = next(self._next)
        self._sizes[key] = size_bytes  # count first: other threads allocate buffers too
        try:
            self._check(size_bytes, what)
            with phase("allocating host memory"):
                buffer = HostBuffer(size_bytes, pin=pin, touch=touch, node=self.node)
        except BaseException as error:
            del self._sizes[key]
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise HostMemoryError(
                    f"megacompile(): the system refused {format_bytes(size_bytes)} of host memory "
                    f"for {what} ({error}); raise the limit of the process (ulimit -d, ulimit -v), "
                    "or set a smaller host_memory="
                ) from error
            raise
        weakref.finalize(buffer, self._sizes.pop, key).atexit = False
        self._buffers.add(buffer)
        return buffer

    def _check(self, size_bytes: int, what: str) -> None:
        held = self.held_bytes
        if self.limit_bytes is not None and held > self.limit_bytes:
            raise HostMemoryError(
                f"megacompile(): host_memory is {format_bytes(self.limit_bytes)}; "
                f"{format_bytes(held - size_bytes)} of it is in use, and {what} needs "
                f"{format_bytes(size_bytes)} more; raise host_memory=, or use less: "
                "state_dtype='int8', a smaller batch, or disk="
            )
        check_host_memory([(what, size_bytes)])


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


class Lease(Completion):
    """A buffer that is or will be lent to one use; complete once the buffer is filled.

    Args:
        pool: takes the buffer back.
        size_bytes: the requested size; the buffer may be larger.
        after: work that must complete before a read into the buffer starts.
    """

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
    """Page-locked buffers for copies of a device, with a thread that starts reads into them."""

    def __init__(self, name: str, device: torch.device, budget: HostBudget) -> None:
        self.device = device
        self.budget = budget
        self._thread = Background(name)

    @property
    def pin(self) -> bool:
        """True if the buffers are page-locked."""
        return self.device.type == "cuda"

    def take_back(self, lease: Lease, used: Completion | None) -> None:
        """Take a lease's buffer back; it is free after `used`."""
        raise NotImplementedError

    def _new(self, size_bytes: int, what: str) -> Buffer:
        with torch.cuda.device(self.device) if self.pin else contextlib.nullcontext():
            return Buffer(self.budget.make(size_bytes, what, pin=self.pin), size_bytes)


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
        if not self.pin or self.held_bytes:
            return []
        return [Wanted(size_bytes, pin=True) for size_bytes in sizes]

    def _make(self, size_bytes: int) -> Buffer:
        return self._new(size_bytes, "offloaded activations")


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
