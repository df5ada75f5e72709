"""Reads and writes of a scratch file by background threads.

A request is split into chunks, and the threads of its direction process them in parallel; they
wait in the kernel without the GIL, as fast as io_uring (docs/decisions/0028-disk.md).

[Note: chunks] Between two chunks a thread waits up to 5 ms for the GIL (`sys.getswitchinterval`)
while another thread runs Python, such as the one that launches kernels. A chunk of 4 MiB takes
about as long. So chunks are large, but a request has enough of them for all threads.

[Note: order] Requests are ordered only by `before`, in which a disk thread waits. A write waits
there for the work that computes its content, which never runs on a disk thread; a read waits for
nothing (see [Note: no deadlock] in `runtime/device/pool.py`).

[Note: interrupts] A request is created first and started later, so that the code that must wait for
it is registered before a thread sees it. Every thread of its direction gets all of it, and takes
chunks until none are left. So submitting it twice is harmless: if Ctrl-C interrupts a submission,
the threads that have the request complete it, or its waiter submits it again.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from megacompile.errors import DiskError
from megacompile.runtime.device.background import Background, Completion
from megacompile.runtime.disk.scratch import Place, ScratchFile
from megacompile.text import format_bytes

CHUNK_BYTES = 32 * 2**20  # maximum; see [Note: chunks]
_LEAST_CHUNK_BYTES = 4 * 2**20  # minimum, even if some threads get no chunk
THREADS = 4  # per direction: the disk's queue depth


class Way(enum.Enum):
    """The direction of a request."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A range of a scratch file, and the memory to copy to or from."""

    place: Place
    memory: Callable[[], torch.Tensor]
    """Returns the memory, flat uint8 on the host, once it exists; called from any thread. Direct
    I/O needs multiples of the alignment as address, place and size."""


def nothing() -> None:
    """Do nothing."""


class Request(Completion):
    """A read or write by threads; it references no memory once complete.

    Args:
        what: names the request in errors: "3READ_STATE of 'layers.3'".
        before: called by each thread before its chunks; waits for earlier work. If it raises, the
            request fails.
    """

    def __init__(
        self,
        disk: Disk,
        way: Way,
        spans: Sequence[FileSpan],
        what: str,
        before: Callable[[], None],
    ) -> None:
        self._over: Future[None] = Future()
        super().__init__(future=self._over)
        self._disk, self.way, self.what = disk, way, what
        self.size_bytes = sum(span.place.size_bytes for span in spans)
        unit = disk.file.alignment
        self._chunks = [chunk for span in spans for chunk in _chunks(span, unit)]
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
        """Submit it to the threads; see [Note: interrupts]."""
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
                    place = span.place.at + at
                    _transfer(self._disk.file, self.way, place, span.memory(), at, size)
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
            self._disk.count(self)
            self._over.set_result(None)
        else:
            self._over.set_exception(error if self.explained is None else self.explained(error))

    def _failed(self, error: BaseException, chunk: _Chunk) -> BaseException:
        if isinstance(error, DiskError) or not isinstance(error, OSError):
            return error  # from `before`
        number, folder = error.errno or errno.EIO, self._disk.file.folder
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
        """Wait for completion.

        Raises:
            DiskError: the read or write failed.
        """
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


_PATIENCE_S = 1.0


class Disk:
    """A scratch file, and the threads that read and write it: so many for each direction."""

    def __init__(self, file: ScratchFile, threads: int = THREADS) -> None:
        self.file = file
        self._moved = dict.fromkeys(Way, 0)
        self._counting = threading.Lock()
        self.lanes = {
            way: tuple(Background(f"megacompile-disk-{way.value}-{i}") for i in range(threads))
            for way in Way
        }

    def request(
        self, way: Way, spans: Sequence[FileSpan], what: str, before: Callable[[], None] = nothing
    ) -> Request:
        """Create a read or write; the caller starts it with `begin`. See `Request`."""
        return Request(self, way, spans, what, before)

    def moved_bytes(self, way: Way) -> int:
        """Bytes of all successful requests so far, without accesses through mappings."""
        return self._moved[way]

    def count(self, request: Request) -> None:
        """Count the bytes of a successful request; called by the completing thread."""
        with self._counting:
            self._moved[request.way] += request.size_bytes


_Chunk = tuple[FileSpan, int, int]  # offset in the span, bytes


def _chunks(span: FileSpan, alignment: int) -> list[_Chunk]:
    whole = span.place.size_bytes
    size = min(CHUNK_BYTES, max(whole // THREADS, _LEAST_CHUNK_BYTES))
    size = max(size // alignment, 1) * alignment
    return [(span, i, min(size, whole - i)) for i in range(0, whole, size)]


def _transfer(
    file: ScratchFile, way: Way, at: int, whole: torch.Tensor, start: int, size: int
) -> None:
    """Read or write one chunk; the system may split it into several calls."""
    address = whole.data_ptr() + start
    assert whole.dtype is torch.uint8 and start + size <= whole.numel()
    fd = file.fd
    if file.direct_fd is not None and not any(x % file.alignment for x in (address, at, size)):
        fd = file.direct_fd
    memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
    call = os.preadv if way is Way.READ else os.pwritev
    done = 0
    while done < size:
        count = call(fd, [memory[done:]], at + done)
        if count == 0:
            raise OSError(errno.EIO, "end of file")
        done += count
        if done < size:
            fd = file.fd  # the rest may be unaligned
    if fd == file.fd:
        os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)  # also starts writing dirty pages
