"""The memory of a bucket's tensors, on the host or the device.

[Note: exact-size pinned memory]
`torch.empty(pin_memory=True)` rounds up to a power of two: a 525 MiB layer takes 1 GiB. A mapping
registered with `cudaHostRegister` takes exactly its size. It is shared, not private, so that a
forked data loader never turns its pages copy-on-write during DMA. Memory that only the CPU uses is
private, in huge pages if the system has them.

[Note: forks] A child of a fork must not write into the parent's parameters. Private memory is
copied on write, as usual. Shared memory is one in-memory file, in which each buffer has its own
range; the child maps that range again, privately: its writes stay private, and unwritten pages show
the parent's current content. This costs nothing until the child writes.

[Note: one storage a parameter]
Each parameter is a tensor with its own storage inside the buffer, so `torch.save`, safetensors and
all other code that inspects storages sees ordinary parameters.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from megacompile import numa
from megacompile.host_memory import PAGE_LOCKS
from megacompile.ir.buckets import Param
from megacompile.runtime.device import forks


class HostBuffer(mmap.mmap):
    """Anonymous memory, page-locked for a CUDA device if possible (`locked`).

    It is unlocked and unmapped when the last tensor on it is freed.

    Args:
        touch: page-lock it at once. Otherwise the caller fills it and then calls `lock`.
        node: the NUMA node near the device that it is page-locked for; None: any.
    """

    _address: int = 0  # if page-locking was requested
    locked: bool = False
    private: bool = False
    _at: int | None = None  # its offset in the shared-memory file
    _node: numa.Node | None = None  # the NUMA node of its pages

    def __new__(
        cls, size_bytes: int, *, pin: bool, touch: bool = True, node: numa.Node | None = None
    ) -> HostBuffer:
        kind = mmap.MAP_SHARED if pin else mmap.MAP_PRIVATE
        made = super().__new__(cls, -1, max(size_bytes, mmap.PAGESIZE), kind | mmap.MAP_ANONYMOUS)
        made.private = not pin
        made._node = node
        if pin:
            made._share()
            made._prefer()
        if hasattr(mmap, "MADV_HUGEPAGE"):  # 10 % more bandwidth for the CPU
            made.madvise(mmap.MADV_HUGEPAGE)  # few systems have them for shared memory
        if pin and touch:
            made.settle()
        return made

    def _share(self) -> None:
        """Move it into the shared-memory file, if there is one."""
        self._process = os.getpid()
        self._file = _file_of(self._process)
        at = self._file.take(len(self))
        if at is not None and self._map(mmap.MAP_SHARED, at):
            self._at = at
            forks.tell(self)

    def _map(self, kind: int, at: int) -> bool:
        """Map a range of the file over this memory; False if that fails."""
        start = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        return self._file.fd is not None and not map_over(start, len(self), kind, self._file.fd, at)

    def _prefer(self) -> None:
        """Allocate pages near the device that copies from and to it. Memory that no device copies
        is placed near the thread that uses it."""
        if self._node is not None:
            start = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            numa.prefer(start, len(self), self._node)

    def before_fork(self) -> None:
        """Do nothing: the child does the work."""

    def after_fork(self, *, in_child: bool) -> None:
        """Remap it privately; see [Note: forks]."""
        if in_child and self._at is not None:
            self._map(mmap.MAP_PRIVATE, self._at)

    def settle(self) -> None:
        """Allocate its pages on several threads, and page-lock it."""
        touch_pages(torch.frombuffer(self, dtype=torch.uint8), self._node)
        self.lock()

    def lock(self) -> None:
        """Page-lock it, unless that is done already or the system forbids it.

        Memory that the system refuses to lock stays pageable; see `megacompile.host_memory`.
        """
        if self._address:
            return
        if self.private and hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)  # its pages would be copied on write during DMA
        if self.private:  # shared memory was touched at creation or filled
            self._prefer()
            touch_pages(torch.frombuffer(self, dtype=torch.uint8), self._node)
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        self.locked = PAGE_LOCKS.lock(self._address, len(self))

    def __del__(self) -> None:
        if self._address:
            PAGE_LOCKS.unlock(self._address)
        if self._at is not None and self._process == os.getpid():
            self.madvise(mmap.MADV_REMOVE)  # otherwise the file would keep the memory

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
        return torch.frombuffer(self, dtype=torch.uint8)[:size_bytes]  # count=0 is an error


class Wanted(NamedTuple):
    """A buffer that will be requested."""

    size_bytes: int
    pin: bool  # as in the request
    lock: bool = False  # it will be page-locked after filling


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
        del size_bytes
        return torch.empty(0, dtype=torch.uint8)


class SharedFile:
    """A growing in-memory file; each range is allocated once, and a freed range has no memory.

    All buffers share one file, so they need no file descriptors of their own. It is unnamed and
    disappears with the last close.

    [Note: places in the file] Several threads create buffers concurrently, and two buffers in one
    range would overwrite each other. The next range starts at the file's position, which the kernel
    advances atomically; a lock could stay locked after Ctrl-C (see `runtime.device.background`).
    The file grows by a write: `ftruncate` with an outdated size would cut off ranges that other
    threads have allocated since.
    """

    def __init__(self) -> None:
        self.fd: int | None = None
        try:
            self.fd = os.memfd_create("megacompile")
        except (AttributeError, OSError):  # not Linux, or not allowed
            return
        weakref.finalize(self, os.close, self.fd).atexit = False

    def take(self, size_bytes: int) -> int | None:
        """Allocate a range of this many bytes, in any thread; None if there is no file or no
        space."""
        if self.fd is None:
            return None
        whole = -(-size_bytes // _HUGE_PAGE) * _HUGE_PAGE
        try:
            at = os.lseek(self.fd, whole, os.SEEK_CUR) - whole
            os.pwrite(self.fd, b"\0", at + size_bytes - 1)
        except OSError:  # file size limit, or out of memory
            return None
        return at


def map_over(start: int, size_bytes: int, kind: int, fd: int, at: int) -> int:
    """Map a range of a file over mapped memory; returns 0 or an errno."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _system_mmap()(start, size_bytes, access, kind | _MAP_FIXED, fd, at)
    return 0 if found == start else ctypes.get_errno()


@functools.cache
def _system_mmap() -> Callable[[int, int, int, int, int, int], int]:
    found = ctypes.CDLL(None, use_errno=True).mmap
    found.restype = ctypes.c_void_p
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_int64)
    made: Callable[[int, int, int, int, int, int], int] = found
    return made


@functools.cache
def _file_of(process: int) -> SharedFile:
    """The file of this process: a child would allocate the same ranges as its parent."""
    del process
    return SharedFile()


_HUGE_PAGE = 2 * 2**20
_MAP_FIXED = 0x10  # on Linux


# Allocation of pages on several threads.
# The kernel allocates and clears a page at its first write: 6.5 GiB/s on one thread of a machine
# with an H200, for writing and for page-locking. Present pages are locked at 25 GiB/s.
# MADV_POPULATE_WRITE takes less than half the time of writing, per core, and no longer on two
# threads than on one (Linux 6.18, private and shared memory).

MOST_THREADS = 8  # beyond this, memory bandwidth is the limit
CHUNK_BYTES = 64 * 2**20  # whole huge pages
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14


def touch_pages(memory: torch.Tensor, node: numa.Node | None = None) -> None:
    """Allocate the pages of a mapping, without changing its content.

    Args:
        memory: (size_bytes,) uint8, whole pages.
        node: the NUMA node whose cores run the other threads; None: any.
    """
    size_bytes = memory.numel()
    chunks = deque(range(0, size_bytes, CHUNK_BYTES))
    refused = threading.Event()
    advise = _madvise()

    def work() -> None:
        start = memory.data_ptr()  # keeps the memory alive
        while chunks and not refused.is_set():
            try:
                first = chunks.popleft()
            except IndexError:  # another thread took it
                return
            end = min(first + CHUNK_BYTES, size_bytes)
            if advise(start + first, end - first, _POPULATE_WRITE):
                refused.set()

    def near() -> None:
        if node is not None:
            numa.bind(node.cores)
        work()

    count = min(MOST_THREADS, numa.usable_cores() if node is None else len(node.cores), len(chunks))
    threads = []
    try:
        for _ in range(count - 1 if node is None else count):
            thread = threading.Thread(target=near, name="megacompile-touch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                break
            threads.append(thread)
        if node is None or not threads:
            work()
        for thread in threads:
            thread.join()
    finally:
        chunks.clear()  # the threads end when Ctrl-C comes
    if refused.is_set():  # an old kernel, or too little memory: the first write fails instead
        memory[:: mmap.PAGESIZE].bitwise_or_(0)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    """The system's `madvise(address, bytes, advice)`; returns 0 on success. It releases the GIL,
    which `mmap.madvise` holds."""
    try:
        found = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):  # missing on this system
        return lambda start, size_bytes, advice: -1
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    made: Callable[[int, int, int], int] = found
    return made


# Returns freed memory that malloc keeps to the system.
# Blocks below malloc's mmap threshold (up to 32 MiB) are in its heap and stay there when freed.
# Parameters that have moved to buckets would then take their memory twice.

TRIM_BYTES = 2**30  # freed bytes that are worth the milliseconds of a trim


def trim_heap() -> None:
    """Return malloc's free memory to the system, with the GNU C library."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    return found
