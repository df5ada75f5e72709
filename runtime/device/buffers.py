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
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

import torch

from megacompile import numa
from megacompile.host_memory import PAGE_LOCKS
from megacompile.ir.buckets import Param
from megacompile.runtime.device import forks
from megacompile.runtime.device.background import Background, fulfil, is_over
from megacompile.runtime.device.touch import touch as touch_pages


class HostBuffer(mmap.mmap):
    """Anonymous memory, page-locked for a CUDA device where that works (`locked`).

    It is unmapped, and unlocked before, when the last tensor on it is gone.
    """

    _address: int = 0  # where it was asked to be page-locked
    locked: bool = False
    _at: int | None = None  # its place in the file of shared memory
    _node: numa.Node | None = None  # near which it is page-locked

    def __new__(
        cls, size_bytes: int, *, pin: bool, touch: bool = True, node: numa.Node | None = None
    ) -> HostBuffer:
        del touch
        kind = mmap.MAP_SHARED if pin else mmap.MAP_PRIVATE
        made = super().__new__(cls, -1, max(size_bytes, mmap.PAGESIZE), kind | mmap.MAP_ANONYMOUS)
        if pin:
            made._share()
        made._node = node
        if pin:
            made._prefer()
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a tenth more bandwidth for the CPU
            made.madvise(mmap.MADV_HUGEPAGE)  # shared memory has them on few systems
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
        return self._file.map(start, len(self), kind, at)

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

    def __init__(
        self, size_bytes: int, *, pin: bool, touch: bool = True, node: numa.Node | None = None
    ) -> None:
        """
        Args:
            touch: page-lock it at once. Else the code that has filled it calls `lock`.
            node: near the device that it is page-locked for; None: any.
        """
        del size_bytes, node
        self.private = not pin
        if pin and touch:
            self.settle()

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
            weakref.finalize(self, os.close, self.fd).atexit = False
            self._mmap = ctypes.CDLL(None, use_errno=True).mmap
        except (AttributeError, OSError):  # not Linux, or not allowed
            return
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), _OFFSET)

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

    def map(self, start: int, size_bytes: int, kind: int, at: int) -> bool:
        """Map a place over memory that is mapped; False where that cannot be."""
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = self._mmap(start, size_bytes, access, kind | _MAP_FIXED, self.fd, at)
        return bool(found == start)


@functools.cache
def _file_of(process: int) -> SharedFile:
    """The file of one process: a child would take the places that its parent takes."""
    del process
    return SharedFile()


_HUGE_PAGE = 2 * 2**20
_MAP_FIXED = 0x10  # on Linux
_OFFSET = ctypes.c_int64  # off_t


# Host buffers that are made in the background, before anybody asks for them.
#
# Pages of a gigabyte take 0.1 s, to page-lock them 0.2 s: of 40 GiB of gradients and states 9 s of
# a first step of 65 s, which other parts of that step can hide. A caller that makes a buffer takes
# one of its size that is ready, or waits for it where it is being made. What is not there yet he
# makes himself.


class Wanted(NamedTuple):
    """A buffer that will be asked for."""

    size_bytes: int
    pin: bool  # how it will be asked for
    lock: bool = False  # it will be page-locked after that


class BuffersAhead:
    """Makes buffers, one after the other.

    Args:
        make: makes one; what it raises is not told, because it is raised once more where a caller
            asks for the buffer.
    """

    def __init__(self, make: Callable[[Wanted], HostBuffer]) -> None:
        self._make = make
        self._made: dict[tuple[int, bool], deque[Future[HostBuffer]]] = {}
        self._thread = Background("megacompile-host-memory")

    def begin(self, wanted: Iterable[Wanted]) -> None:
        """Make these, in this order, after those that are not made yet."""
        for each in wanted:
            future: Future[HostBuffer] = Future()
            self._made.setdefault((each.size_bytes, each.pin), deque()).append(future)
            self._thread.submit(functools.partial(_fulfil, future, self._make, each))

    def take(self, size_bytes: int, *, pin: bool) -> HostBuffer | None:
        """One that is made, or being made; None: there is none, and one less is made."""
        try:
            future = self._made[size_bytes, pin].popleft()
        except (KeyError, IndexError):
            return None
        if future.cancel() or future.exception() is not None:
            return None
        return future.result()

    def forget(self) -> None:
        """The others will not be asked for."""
        while self._made:
            _, futures = self._made.popitem()
            while futures:
                futures.popleft().cancel()

    def await_idle(self) -> None:
        """Wait until nothing is being made. What was not asked for has no memory then."""
        self._thread.call(lambda: None)


def _fulfil(
    future: Future[HostBuffer], make: Callable[[Wanted], HostBuffer], wanted: Wanted
) -> None:
    if is_over():
        future.cancel()
    fulfil(future, functools.partial(make, wanted))
