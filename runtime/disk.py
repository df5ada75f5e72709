"""A private file on a disk, allocation of byte ranges (places) in it, and threads that read and
write them (docs/decisions/0028-disk.md).

The file has no name (it is unlinked after creation), so the system frees it when this process and
its forked children have ended, even if they are killed. Taking a place allocates its blocks, so a
full disk is detected there, not in the middle of a step. New places read as zeros. A place that was
given back has no blocks, and is used again for the same size.

[Note: direct I/O] Reads and writes of a step bypass the page cache (`O_DIRECT`). If the file system
does not support it (some network and FUSE ones), they use the cache, and the system is asked to
drop the pages afterwards.

[Note: coherence] User code reads places through a shared mapping (`DiskBuffer`), that is, through
the page cache, which Linux keeps coherent with direct I/O, except for concurrent accesses to one
page. The guards of states exclude those (`runtime/params/guards.py`), and places are page-aligned.
POSIX does not define O_DIRECT; file systems that fail `_is_coherent` do without.

[Note: chunks] The threads of a direction process the chunks of a request in parallel; they wait in
the kernel without the GIL. Between two chunks a thread may wait 5 ms for the GIL, as long as a
chunk of 4 MiB takes. So chunks are large, but a request has enough of them for all threads.

[Note: order] Requests are ordered only by `before`, in which a disk thread waits. A write waits
there for the work that computes its content, which never runs on a disk thread; a read waits for
nothing (see [Note: no deadlock] in `runtime/device/pool.py`).

[Note: interrupts of a request] A request is created first and started later, so that the code that
must wait for it is registered before a thread sees it. Every thread of its direction gets all of
it, and takes chunks until none are left. So submitting it twice is harmless: if Ctrl-C interrupts a
submission, the threads that have the request complete it, or its waiter submits it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import itertools
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from megacompile import notices
from megacompile.errors import DiskError
from megacompile.runtime.device.background import Background, Completion, nothing
from megacompile.text import format_bytes

CHUNK_BYTES = 32 * 2**20  # maximum; see [Note: chunks]
_LEAST_CHUNK_BYTES = 4 * 2**20  # minimum, even if some threads get no chunk
THREADS = 4  # per direction: the disk's queue depth
_PATIENCE_S = 1.0  # of a waiter, before it submits a request again
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of fallocate(2)


class Way(enum.Enum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Place:
    """A range of bytes in the file. `take` returns aligned places. Unaligned parts of them go
    through the page cache."""

    at: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A range of the file, and the memory to copy to or from."""

    place: Place
    memory: Callable[[], torch.Tensor]
    """Returns the memory, flat uint8 on the host, once it exists; called from any thread. Direct
    I/O needs multiples of the alignment as address, place and size."""


class Disk:
    """An unnamed file in a folder, and the threads that read and write it.

    A child of a fork sees its content through mappings, but cannot read, write or allocate.

    Args:
        folder: an existing folder on the disk.
        limit_bytes: of all places together; None: the free space of the disk.

    Raises:
        DiskError: the folder does not exist, or no file can be created in it.
    """

    alignment = max(4096, mmap.PAGESIZE)  # bytes, of offsets, lengths and addresses in direct I/O

    def __init__(self, folder: str | os.PathLike[str], *, limit_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.process = os.getpid()
        self._end = 0
        # by size; thread-safe: popping a place claims it
        self._free: dict[int, deque[Place]] = {}
        self._given_back: deque[Place] = deque()
        self.lanes = {
            way: tuple(Background(f"megacompile-disk-{way.value}-{i}") for i in range(THREADS))
            for way in Way
        }
        try:
            self.fd, name = tempfile.mkstemp(prefix=".megacompile-", dir=folder)
            os.unlink(name)
        except OSError as error:
            raise DiskError(
                error.errno or errno.EIO,
                f"disk={str(folder)!r}: no file can be created there ({error.strerror or error}); "
                "needed a folder that this process can write to, on a local disk",
            ) from error
        weakref.finalize(self, os.close, self.fd)
        self.direct_fd: int | None = None
        try:
            self.direct_fd = self._direct()
        except OSError as error:
            notices.warn_once(
                f"no direct I/O on device {os.fstat(self.fd).st_dev}",
                f"megacompile: disk={str(self.folder)!r} has no direct I/O "
                f"({error.strerror or error}): reads and writes go through the page cache, which "
                "takes host memory and CPU time; use a folder on a local file system (ext4, xfs, "
                "btrfs)",
                notices.Whose.HOST,
            )

    def _direct(self) -> int:
        """Open the file for direct I/O; see [Note: direct I/O]. Raises OSError: the file system
        does not support it, or its reads and writes are not coherent with mappings of the file."""
        direct = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT)
        weakref.finalize(self, os.close, direct)
        place = self.take(self.alignment)
        try:
            if not _is_coherent(self.fd, direct, place):  # or reads and writes may be refused
                raise OSError("direct reads and writes are not coherent with mappings of the file")
        finally:
            self.give_back(place)
        return direct

    @property
    def ours(self) -> bool:
        """True in the process that created the file; False in a child of a fork."""
        return self.process == os.getpid()

    def _check_ours(self, what: str) -> None:
        if not self.ours:
            raise DiskError(
                errno.EOWNERDEAD,
                f"{what}: disk={str(self.folder)!r} belongs to the process that called "
                "megacompile(), and this is a child of it (a fork), which can read parameters and "
                "states but not train; call megacompile() in the child, or leave out disk=",
            )

    def round_up(self, size_bytes: int) -> int:
        return max(-(-size_bytes // self.alignment), 1) * self.alignment

    def take(self, size_bytes: int) -> Place:
        """Allocate a place of at least this many bytes, filled with zeros. Raises DiskError: the
        disk is full, or the limit is reached."""
        self._check_ours("allocation on the disk")
        size = self.round_up(size_bytes)
        self._check_limit(size)
        place = self._find(size)
        try:
            os.posix_fallocate(self.fd, place.at, place.size_bytes)
        except OSError as error:
            self._keep(place)
            raise self._full(error.errno or errno.EIO, size) from error
        self.used_bytes += size
        return place

    def check(self, size_bytes: int) -> None:
        """Check that this many bytes could be allocated, without allocating them. Raises DiskError:
        as `take`."""
        self._check_limit(size_bytes)
        if size_bytes > shutil.disk_usage(self.folder).free:
            raise self._full(errno.ENOSPC, size_bytes)

    def _check_limit(self, size: int) -> None:
        """Deallocate the places that were given back, and compare with the limit."""
        with contextlib.suppress(IndexError):  # empty
            while True:
                place = self._given_back.popleft()
                self.used_bytes -= place.size_bytes
                if _punch(self.fd, place):  # otherwise not reused: it would not read as zeros
                    self._keep(place)
        if self.limit_bytes is not None and self.used_bytes + size > self.limit_bytes:
            raise DiskError(
                errno.EDQUOT,
                f"disk_memory={format_bytes(self.limit_bytes)} is too small: "
                f"{format_bytes(self.used_bytes)} are used in {self.folder}, and "
                f"{format_bytes(size)} more are needed; raise disk_memory=",
            )

    def _full(self, number: int, size: int) -> DiskError:
        return DiskError(
            number,
            f"disk={str(self.folder)!r} has no space for {format_bytes(size)} more "
            f"({os.strerror(number)}; megacompile uses {format_bytes(self.used_bytes)}, "
            f"and {format_bytes(shutil.disk_usage(self.folder).free)} are free); free space there, "
            "or use a folder on a larger disk",
        )

    def _find(self, size: int) -> Place:
        with contextlib.suppress(KeyError, IndexError):
            return self._free[size].popleft()
        at = self._end  # no call between these two lines, so threads do not switch there
        self._end = at + size
        return Place(at, size)

    def give_back(self, place: Place) -> None:
        """Free a place. Finalizers call this too, possibly in the middle of `take`."""
        if self.ours:
            self._given_back.append(place)

    def _keep(self, place: Place) -> None:
        self._free.setdefault(place.size_bytes, deque()).append(place)

    def request(
        self, way: Way, spans: Sequence[FileSpan], what: str, before: Callable[[], None] = nothing
    ) -> Request:
        """Create a read or write; the caller starts it with `begin`. See `Request`. Raises
        DiskError: this is a child of a fork."""
        self._check_ours(what)
        return Request(self, way, spans, what, before)


def _punch(fd: int, place: Place) -> bool:
    """Deallocate the blocks of a place; returns False if this is not supported."""
    span = (ctypes.c_int64(place.at), ctypes.c_int64(place.size_bytes))
    return bool(ctypes.CDLL(None).fallocate(fd, _PUNCH_HOLE, *span) == 0)


def _is_coherent(fd: int, direct: int, place: Place) -> bool:
    """True if direct I/O reads values written through a mapping, and the reverse."""
    size = place.size_bytes
    with mmap.mmap(fd, size, offset=place.at) as shared, mmap.mmap(-1, size) as memory:
        ways = (shared, os.preadv), (memory, os.pwritev)
        for value, (source, call) in enumerate(ways * 3, 1):
            source[:] = bytes([value]) * size
            call(direct, [memory], place.at)
            if memory[:] != shared[:]:
                return False
    return True


_Chunk = tuple[FileSpan, int, int]  # offset in the span, bytes


class Request(Completion):
    """A read or write by threads; it references no memory once complete."""

    def __init__(
        self,
        disk: Disk,
        way: Way,
        spans: Sequence[FileSpan],
        what: str,  # its name in errors: "3READ_STATE of 'layers.3'"
        # called by each thread before its chunks; waits for earlier work. If it raises, all fails
        before: Callable[[], None],
    ) -> None:
        self._over: Future[None] = Future()
        super().__init__(future=self._over)
        self._disk, self.way, self.what = disk, way, what
        self.size_bytes = sum(span.place.size_bytes for span in spans)
        self._chunks = [chunk for span in spans for chunk in _chunks(span, disk.alignment)]
        self._count, self._before = len(self._chunks), before
        self._next = itertools.count()  # threads advance both counters without a lock
        self._done = itertools.count(1)
        self._error: BaseException | None = None
        self.held = False  # True until its pool has a buffer and starts it; waiters must not
        self.at_end: Callable[[], None] = nothing  # called once, before waiters continue
        self.explained: Callable[[BaseException], BaseException] | None = None
        """Converts the first error to the one that `wait` raises."""
        self.began_s = self.ended_s = 0.0  # of `time.perf_counter`

    def begin(self) -> None:
        """Submit it to the threads; see [Note: interrupts of a request]."""
        self.held = False
        if self._count == 0:
            if next(self._done) == 1:  # a waiter may call this again
                self._end(None)
        elif not self.done():
            for lane in self._disk.lanes[self.way]:
                lane.submit(self.work)

    def work(self) -> None:
        """Process chunks until none are left; called by each thread."""
        while (i := next(self._next)) < self._count:
            if self._error is None:
                try:
                    self._before()
                    self.began_s = self.began_s or time.perf_counter()
                    span, at, size = self._chunks[i]
                    _transfer(self._disk, self.way, span.place.at + at, span.memory(), at, size)
                except BaseException as error:
                    self._error = self._error or self._failed(error, self._chunks[i])
            if next(self._done) == self._count:
                self._end(self._error)

    def _end(self, error: BaseException | None) -> None:
        self.ended_s = time.perf_counter()
        self._chunks, self._before = [], nothing
        at_end, self.at_end = self.at_end, nothing
        at_end()
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error if self.explained is None else self.explained(error))

    def _failed(self, error: BaseException, chunk: _Chunk) -> BaseException:
        if isinstance(error, DiskError) or not isinstance(error, OSError):
            return error  # from `before`
        number, folder = error.errno or errno.EIO, self._disk.folder
        is_full = number in (errno.ENOSPC, errno.EDQUOT)
        failing = "the disk or its connection may be failing: see the system's log (dmesg)"
        return DiskError(
            number,
            f"{self.what}: the {self.way.value} of {format_bytes(self.size_bytes)} failed at "
            f"offset {chunk[0].place.at + chunk[1]} of the scratch file in {folder} with errno "
            f"{number} ({os.strerror(number)}); {'free space there' if is_full else failing}, or "
            "name another folder as disk=",
        )

    def wait(self) -> None:
        """Wait for completion. Raises DiskError: the read or write failed."""
        self.finish()
        self._over.result()

    def finish(self) -> None:
        """Wait until it has completed or failed."""
        while not self._over.done():
            try:
                self._over.exception(timeout=_PATIENCE_S)
            except TimeoutError:
                if not self.held:
                    self.begin()

    def call_off(self, error: BaseException) -> None:
        """Fail a request that was not started; waiters raise `error`."""
        if not self._over.done():
            self.began_s = time.perf_counter()
            self._end(error)

    def when_done(self, work: Callable[[], None]) -> None:
        """Register a function that the completing thread calls."""
        self._over.add_done_callback(lambda _: work())


def _chunks(span: FileSpan, alignment: int) -> list[_Chunk]:
    whole = span.place.size_bytes
    size = min(CHUNK_BYTES, max(whole // THREADS, _LEAST_CHUNK_BYTES))
    size = max(size // alignment, 1) * alignment
    return [(span, i, min(size, whole - i)) for i in range(0, whole, size)]


def _transfer(disk: Disk, way: Way, at: int, whole: torch.Tensor, start: int, size: int) -> None:
    """Read or write one chunk; the system may split it into several calls."""
    address = whole.data_ptr() + start
    assert whole.dtype is torch.uint8 and start + size <= whole.numel()
    fd = disk.fd
    if disk.direct_fd is not None and not any(x % disk.alignment for x in (address, at, size)):
        fd = disk.direct_fd
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    call = os.preadv if way is Way.READ else os.pwritev
    done = 0
    while done < size:
        count = call(fd, [memory[done:]], at + done)
        if count == 0:
            raise OSError(errno.EIO, "end of file")
        done += count
        if done < size:
            fd = disk.fd  # the rest may be unaligned
    if fd == disk.fd:
        os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)  # also starts writing dirty pages
