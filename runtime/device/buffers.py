"""The memory of a bucket's tensors: on the host, the device or a disk
(docs/decisions/0004-host-buffers.md).

[Note: exact-size pinned memory] A mapping registered with `cudaHostRegister` takes exactly its
size, not the next power of two. It is shared, so that a forked data loader never turns its pages
copy-on-write during DMA. Memory that only the CPU uses is private, in huge pages if possible.

[Note: forks] Private memory is copied on write, as usual. Page-locked memory is shared with a child
of a fork, which cannot use CUDA and may only read it. The child maps a scratch file again,
privately: its writes stay private, and unwritten pages show the parent's current content. A scratch
file exists until the last child has ended.

[Note: one storage a parameter] Each parameter is a tensor with its own storage inside the buffer,
so code that inspects storages (`torch.save`, safetensors) sees ordinary parameters.

[Note: buffers allocated in advance] Allocating and locking a gigabyte takes 0.3 s. So a thread
allocates buffers in advance. A caller takes a ready buffer of its size, or waits for one that is
being allocated.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from megacompile.errors import DiskError, HostMemoryError
from megacompile.host_memory import PAGE_LOCKS, check_host_memory, usable_cores
from megacompile.ir.buckets import Param
from megacompile.progress import phase
from megacompile.runtime.device.background import Background, at_fork, fulfil, is_over
from megacompile.runtime.disk import Disk, FileSpan, Place
from megacompile.text import format_bytes


class HostBuffer(mmap.mmap):
    """Anonymous memory, page-locked for a CUDA device if possible (`locked`). It is unlocked and
    unmapped when the last tensor on it is freed.

    Unless `touch`, it is not page-locked at once: the caller fills it and then calls `lock`.
    """

    _address: int = 0  # if page-locking was requested
    locked: bool = False
    private: bool = False
    _process: int = 0

    def __new__(cls, size_bytes: int, *, pin: bool, touch: bool = True) -> HostBuffer:
        kind = mmap.MAP_SHARED if pin else mmap.MAP_PRIVATE
        made = super().__new__(cls, -1, max(size_bytes, mmap.PAGESIZE), kind | mmap.MAP_ANONYMOUS)
        made.private, made._process = not pin, os.getpid()
        # 10 % more bandwidth for the CPU; few systems have them for shared memory
        made.madvise(mmap.MADV_HUGEPAGE)
        if pin and touch:
            made.settle()
        return made

    @property
    def _flat(self) -> torch.Tensor:
        return torch.frombuffer(self, dtype=torch.uint8)

    def settle(self) -> None:
        """Allocate its pages on several threads, and page-lock it."""
        _touch_pages(self._flat)
        self.lock()

    def lock(self) -> None:
        """Page-lock it, if that is not done; memory that the system refuses stays pageable, see
        `megacompile.host_memory`."""
        if self._address:
            return
        if self.private:  # shared memory was touched at creation or filled
            self.madvise(mmap.MADV_DONTFORK)  # its pages would be copied on write during DMA
            _touch_pages(self._flat)
        self._address = self._flat.data_ptr()
        self.locked = PAGE_LOCKS.lock(self._address, len(self))

    def __del__(self) -> None:
        if self._address:
            PAGE_LOCKS.unlock(self._address)
        if not self.private and self._process == os.getpid():
            with contextlib.suppress(OSError):  # not every system can
                self.madvise(mmap.MADV_REMOVE)  # otherwise forked children would keep the memory

    def tensor(self, param: Param) -> torch.Tensor:
        """A tensor with the shape of `param` at its offset, with its own storage."""
        if param.numel == 0:
            return torch.empty(param.shape, dtype=param.dtype)
        flat = torch.frombuffer(
            self, dtype=param.dtype, count=param.numel, offset=param.offset_bytes
        )
        # not as_strided: a view would keep `flat` alive, and so a second user of the storage
        whole = torch.empty(0, dtype=param.dtype)
        return whole.set_(flat.untyped_storage(), 0, param.shape, param.stride)

    def bytes(self, size_bytes: int) -> torch.Tensor:
        """The first `size_bytes` as one flat uint8 tensor."""
        return self._flat[:size_bytes]


class Wanted(NamedTuple):
    """A buffer that will be requested."""

    size_bytes: int
    pin: bool  # as in the request
    lock: bool = False  # it will be page-locked after filling


Memory = Callable[[], torch.Tensor]  # returns (len(buffer),) uint8; see `FileSpan`


class DiskBuffer(HostBuffer):
    """A mapped range of a disk's file, initially zero. It is freed with the last tensor on it. Its
    size is rounded up to the disk's I/O size. Readers outside of a step use the mapping, by page
    faults. A step reads and writes the same bytes by direct I/O, into and out of page-locked
    memory; see [Note: coherence] in `runtime/disk.py`. A child of a fork has only the mapping: see
    [Note: forks]. Raises DiskError: the disk is full, `disk_memory=` is used up, files cannot be
    mapped, or this is a child of a fork."""

    disk: Disk
    _place: Place | None = None

    def __new__(cls, size_bytes: int, disk: Disk) -> DiskBuffer:
        size = disk.round_up(size_bytes)
        made = mmap.mmap.__new__(cls, -1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made.disk = disk
        made._place = disk.take(size)
        if number := made._map(mmap.MAP_SHARED):
            raise DiskError(
                number,
                f"disk={str(disk.folder)!r}: mmap of {size} bytes failed with errno {number} "
                f"({os.strerror(number)}); needed a file system whose files can be mapped, and "
                "enough maps (sysctl vm.max_map_count)",
            )
        made.madvise(mmap.MADV_SEQUENTIAL)  # reading all of it is twice as fast
        at_fork(made)
        return made

    def _map(self, kind: int) -> int:
        """Map its place in the file over this memory; returns 0 or an errno."""
        assert self._place is not None
        start, access = self._flat.data_ptr(), mmap.PROT_READ | mmap.PROT_WRITE
        place = (ctypes.c_void_p(start), ctypes.c_size_t(len(self)))
        offset = ctypes.c_int64(self._place.at)
        call = _libc("mmap", ctypes.c_void_p)
        found = call(*place, access, kind | _MAP_FIXED, self.disk.fd, offset)
        return 0 if found == start else ctypes.get_errno() or errno.ENOSYS

    def after_fork(self, *, in_child: bool) -> None:
        """Map it again, privately; see [Note: forks]."""
        if in_child:
            self._map(mmap.MAP_PRIVATE)

    def span(self, memory: Memory) -> FileSpan:
        """The whole buffer, paired with memory to copy to or from."""
        return self.part(0, len(self), memory)

    def part(self, begin: int, end: int, memory: Memory) -> FileSpan:
        """The bytes from `begin` to `end`, paired with memory for the whole buffer."""
        assert self._place is not None and 0 <= begin < end <= len(self)
        place = Place(self._place.at + begin, end - begin)
        return FileSpan(place, lambda: memory()[begin:end])

    def lock(self) -> None:
        """Do nothing: file pages are not locked for a device."""

    def __del__(self) -> None:
        if self._place is not None:
            self.disk.give_back(self._place)


class DeviceBuffer:
    """Memory of the device's allocator with the interface of `HostBuffer`, one tensor at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tensor(self, param: Param) -> torch.Tensor:
        """A tensor like `param`, with its own storage."""
        with torch.inference_mode(False):  # it outlives inference mode
            return torch.empty_strided(
                param.shape, param.stride, dtype=param.dtype, device=self.device
            )

    def bytes(self, size_bytes: int) -> torch.Tensor:
        """Return nothing: device buckets are not copied as a whole."""
        return torch.empty(0, dtype=torch.uint8)


class HostBudget:
    """Allocates a model's host buffers, in any thread, and keeps their total within a limit."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes  # of all live buffers together; None: the machine's memory
        self._sizes: dict[int, int] = {}  # of live buffers; a finalizer may run at any time
        self._next = itertools.count()
        self.ahead: dict[tuple[int, bool], deque[Future[HostBuffer]]] = {}  # being allocated
        self._maker = Background("megacompile-host-memory")

    @property
    def held_bytes(self) -> int:
        return sum(list(self._sizes.values()))

    def make(self, size_bytes: int, what: str, *, pin: bool, touch: bool = True) -> HostBuffer:
        """Return a new buffer, or one allocated in advance; `what` names its purpose in errors.
        Raises HostMemoryError: too little memory, or the limit is reached. Without this check the
        kernel would kill the process when the memory is touched."""
        if touch and (ready := self._ready(size_bytes, pin=pin)) is not None:
            return ready
        try:
            return self._new(size_bytes, what, pin=pin, touch=touch)
        except HostMemoryError:
            if not self.ahead:
                raise
        self.drop_preallocated()  # they may never be requested
        self.await_made()
        return self._new(size_bytes, what, pin=pin, touch=touch)

    def _ready(self, size_bytes: int, *, pin: bool) -> HostBuffer | None:
        """Return a buffer that was allocated in advance or is being allocated."""
        try:
            future = self.ahead[size_bytes, pin].popleft()
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
            self.ahead.setdefault((each.size_bytes, each.pin), deque()).append(future)
            self._maker.submit(functools.partial(work, each, future))

    def drop_preallocated(self) -> None:
        """Free the buffers that were allocated in advance but never requested."""
        while self.ahead:
            _, futures = self.ahead.popitem()
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
                buffer = HostBuffer(size_bytes, pin=pin, touch=touch)
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


@functools.cache
def _libc(name: str, result: Any = ctypes.c_int) -> Any:
    """A function of the GNU C library, called without the GIL."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name)
    found.restype = result
    return found


_MAP_FIXED = 0x10  # on Linux

# The kernel allocates and clears a page at its first write: 6.5 GiB/s on one thread of a machine
# with an H200, for writing and for page-locking. Present pages are locked at 25 GiB/s.
# MADV_POPULATE_WRITE takes less than half the time of writing, per core, and no longer on two
# threads than on one (Linux 6.18, private and shared memory).

_MOST_THREADS = 8  # beyond this, memory bandwidth is the limit
_TOUCHED_BYTES = 64 * 2**20  # at a time: whole huge pages
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14


def _touch_pages(memory: torch.Tensor) -> None:
    """Allocate the pages of a mapping in threads, without changing its content: (size_bytes,)
    uint8."""
    size_bytes = memory.numel()

    def touch(first: int) -> int:
        size = min(_TOUCHED_BYTES, size_bytes - first)
        place = (ctypes.c_void_p(memory.data_ptr() + first), ctypes.c_size_t(size))
        refused: int = _libc("madvise")(*place, _POPULATE_WRITE)
        return refused

    chunks = range(0, size_bytes, _TOUCHED_BYTES)
    count = min(_MOST_THREADS, usable_cores(), len(chunks))
    try:
        with ThreadPoolExecutor(count, "megacompile-touch") as threads:
            refused = any(list(threads.map(touch, chunks)))
    except RuntimeError:  # no more threads, or the process is exiting
        refused = any(map(touch, chunks))
    if refused:  # an old kernel, or too little memory: the first write fails instead
        memory[:: mmap.PAGESIZE].bitwise_or_(0)


TRIM_BYTES = 2**30  # freed bytes that are worth the milliseconds of a trim


def trim_heap() -> None:
    """Return malloc's free memory to the system, with the GNU C library. Blocks below malloc's mmap
    threshold (up to 32 MiB) are in its heap and stay there when freed. Parameters that have moved
    to buckets would then take their memory twice."""
    _libc("malloc_trim")(ctypes.c_size_t(0))
