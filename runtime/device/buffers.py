"""The memory that tensors of a bucket are in, on the host or the device.

[Note: exact-size pinned memory]
`torch.empty(pin_memory=True)` rounds up to a power of two: a 525 MiB layer takes 1 GiB. A mapping
that is registered with `cudaHostRegister` takes what it needs. It is shared, not private, so that a
forked data loader never turns its pages into copy-on-write ones under the DMA. Memory that only the
CPU uses is private, in huge pages where the system has them.

[Note: forks] A child of a fork must not write into the parent's parameters. Private memory is the
child's own, as ever. What is shared is in one file in memory, each buffer at a place of its own,
and the child maps that place again, privately: what it writes is its own, and what it has not
written it reads as it is in the parent now. That costs nothing until it writes.

[Note: one storage a parameter]
Each parameter is a tensor with a storage of its own inside the buffer, so `torch.save`,
safetensors and everything else that looks at storages sees ordinary parameters.
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
    """Anonymous memory, page-locked for a CUDA device where that works (`locked`).

    It is unmapped, and unlocked before, when the last tensor on it is gone.

    Args:
        touch: page-lock it at once. Else the code that has filled it calls `lock`.
        node: near the device that it is page-locked for; None: any.
    """

    _address: int = 0  # where it was asked to be page-locked
    locked: bool = False
    private: bool = False
    _at: int | None = None  # its place in the file of shared memory
    _node: numa.Node | None = None  # near which it is page-locked

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
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a tenth more bandwidth for the CPU
            made.madvise(mmap.MADV_HUGEPAGE)  # shared memory has them on few systems
        if pin and touch:
            made.settle()
        return made

    def _share(self) -> None:
        """Moves it into the file of shared memory, if there is one."""
        self._process = os.getpid()
        self._file = _file_of(self._process)
        at = self._file.take(len(self))
        if at is not None and self._map(mmap.MAP_SHARED, at):
            self._at = at
            forks.tell(self)

    def _map(self, kind: int, at: int) -> bool:
        """Map a place of the file where this memory is; False where that cannot be."""
        start = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        return self._file.fd is not None and not map_over(start, len(self), kind, self._file.fd, at)

    def _prefer(self) -> None:
        """Get pages near the device that copies from and to it. Memory that is not copied is
        where the thread runs that uses it."""
        if self._node is not None:
            start = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            numa.prefer(start, len(self), self._node)

    def before_fork(self) -> None:
        """Nothing: the child does it."""

    def after_fork(self, *, in_child: bool) -> None:
        """See the note on forks."""
        if in_child and self._at is not None:
            self._map(mmap.MAP_PRIVATE, self._at)

    def settle(self) -> None:
        """Gives it its pages, on several threads, and page-locks it."""
        touch_pages(torch.frombuffer(self, dtype=torch.uint8), self._node)
        self.lock()

    def lock(self) -> None:
        """Page-lock it, where that was not done when it was made, and where the system allows it.

        What is refused stays pageable; see `megacompile.host_memory`.
        """
        if self._address:
            return
        if self.private and hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)  # its pages would be copied on write, under the DMA
        if self.private:  # what is shared was touched when it was made, or filled
            self._prefer()
            touch_pages(torch.frombuffer(self, dtype=torch.uint8), self._node)
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        self.locked = PAGE_LOCKS.lock(self._address, len(self))

    def __del__(self) -> None:
        if self._address:
            PAGE_LOCKS.unlock(self._address)
        if self._at is not None and self._process == os.getpid():
            self.madvise(mmap.MADV_REMOVE)  # of the file, which would keep it

    def tensor(self, param: Param) -> torch.Tensor:
        """A tensor in the place of `param`, with a storage of its own."""
        if param.numel == 0:
            return torch.empty(param.shape, dtype=param.dtype)
        flat = torch.frombuffer(
            self, dtype=param.dtype, count=param.numel, offset=param.offset_bytes
        )
        # not as_strided: a view would keep `flat` alive, a second user of the storage
        whole = torch.empty(0, dtype=param.dtype)
        return whole.set_(flat.untyped_storage(), 0, param.shape, param.stride)

    def bytes(self, size_bytes: int) -> torch.Tensor:
        """The first `size_bytes` as one flat uint8 tensor."""
        return torch.frombuffer(self, dtype=torch.uint8)[:size_bytes]  # 0 is no count for it


class Wanted(NamedTuple):
    """A buffer that will be asked for."""

    size_bytes: int
    pin: bool  # how it will be asked for
    lock: bool = False  # it will be page-locked after that


class DeviceBuffer:
    """Memory of the device's allocator, with the interface of `HostBuffer`: a tensor at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tensor(self, param: Param) -> torch.Tensor:
        """A tensor like `param`, with a storage of its own."""
        with torch.inference_mode(False):  # it outlives the mode
            return torch.empty_strided(
                param.shape, param.stride, dtype=param.dtype, device=self.device
            )

    def bytes(self, size_bytes: int) -> torch.Tensor:
        """Nothing: what is on the device is not copied as a whole."""
        del size_bytes
        return torch.empty(0, dtype=torch.uint8)


class SharedFile:
    """A file in memory that grows; a place in it is taken once, and has no memory when it is free.

    One for all buffers: each has as few file descriptors as before. It has no name, so nothing is
    left of it after the last close.

    [Note: places in the file] Several threads make buffers at a time, and two that had one place
    would overwrite each other. The next place is the file's position, which the kernel advances at
    once; a lock could stay locked after Ctrl-C (see `runtime.device.background`). The file grows
    by a write: `ftruncate` with a number that is no longer the largest would cut off what others
    have taken meanwhile.
    """

    def __init__(self) -> None:
        self.fd: int | None = None
        try:
            self.fd = os.memfd_create("megacompile")
        except (AttributeError, OSError):  # not Linux, or not allowed
            return
        weakref.finalize(self, os.close, self.fd).atexit = False

    def take(self, size_bytes: int) -> int | None:
        """A new place for so many bytes, in any thread; None where there is none."""
        if self.fd is None:
            return None
        whole = -(-size_bytes // _HUGE_PAGE) * _HUGE_PAGE
        try:
            at = os.lseek(self.fd, whole, os.SEEK_CUR) - whole
            os.pwrite(self.fd, b"\0", at + size_bytes - 1)
        except OSError:  # a limit on the size of files, or no memory
            return None
        return at


def map_over(start: int, size_bytes: int, kind: int, fd: int, at: int) -> int:
    """Map a place of a file over memory that is mapped; returns 0, or the error's number."""
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
    """The file of one process: a child would take the places that its parent takes."""
    del process
    return SharedFile()


_HUGE_PAGE = 2 * 2**20
_MAP_FIXED = 0x10  # on Linux


# Pages for memory, given on several threads.
#
# The kernel provides a page when it is first written, and clears it: 6.5 GiB/s on one thread of a
# machine with an H200, for a thread that writes as for one that page-locks. Pages that are there
# are locked at 25 GiB/s. To ask for pages (MADV_POPULATE_WRITE) takes less than half as long as to
# write to them, per core, and no longer on two threads than on one (Linux 6.18, private and shared
# memory).

MOST_THREADS = 8  # then the memory itself is what takes the time
CHUNK_BYTES = 64 * 2**20  # whole huge pages
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14


def touch_pages(memory: torch.Tensor, node: numa.Node | None = None) -> None:
    """Gives memory its pages. Its content stays as it is.

    Args:
        memory: (size_bytes,) uint8, whole pages.
        node: on whose cores that is done, by other threads than this one; None: on any.
    """
    size_bytes = memory.numel()
    chunks = deque(range(0, size_bytes, CHUNK_BYTES))
    refused = threading.Event()
    advise = _madvise()

    def work() -> None:
        start = memory.data_ptr()  # which it keeps alive
        while chunks and not refused.is_set():
            try:
                first = chunks.popleft()
            except IndexError:  # another thread was faster
                return
            end = min(first + CHUNK_BYTES, size_bytes)
            if advise(start + first, end - first, _POPULATE_WRITE):
                refused.set()

    def near() -> None:
        if node is not None:
            numa.bind(node.cores)
        work()

    count = min(MOST_THREADS, _cores() if node is None else len(node.cores), len(chunks))
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
    if refused.is_set():  # an old kernel, or too little memory, which the writer is told
        memory[:: mmap.PAGESIZE].bitwise_or_(0)


def _cores() -> int:
    """Number of threads that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    """The system's, of (address, bytes, advice), which returns 0 if the pages are there. It runs
    without Python's lock, which `mmap.madvise` keeps."""
    try:
        found = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):  # not there, or not on this system
        return lambda start, size_bytes, advice: -1
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    made: Callable[[int, int, int], int] = found
    return made


# Memory that was freed, and that malloc keeps for itself, goes back to the system.
#
# What is below malloc's threshold for mappings (up to 32 MiB) is in its heap, and stays there when
# it is freed. Parameters that moved to buckets would take their memory twice.

TRIM_BYTES = 2**30  # are freed before it is worth the milliseconds


def trim_heap() -> None:
    """Returns to the system what malloc keeps of freed memory, where it is the GNU C library's."""
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
