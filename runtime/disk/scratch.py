"""A private file on a disk, and allocation of byte ranges (places) in it.

The file has no name (it is unlinked after creation), so the system frees it when this process and
its forked children have ended, even if they are killed. Taking a place allocates its
blocks, so a full disk is detected there, not in the middle of a step. New places read as zeros. A
place that was given back has no blocks, and is used again for the same size.

[Note: direct I/O] Reads and writes of a step bypass the page cache (`O_DIRECT`): disk= is meant to
save host memory, and copying through the cache takes the CPU longer than the transfer takes the
disk. If the file system does not support it (some network and FUSE ones), they use the cache, and
the system is asked to drop the pages afterwards.

[Note: coherence] User code reads places through a shared mapping
(`runtime/device/buffers.py`), that is, through the page cache. Linux keeps the cache coherent
with direct I/O: it writes back dirty pages before a direct access, and a direct write drops the
pages, also from page tables. This fails only for concurrent accesses to one page, which the guards
of states exclude (`runtime/params/guards.py`). So places are page-aligned, and no explicit sync is
needed. POSIX does not define O_DIRECT; file systems that fail `_is_coherent` do without.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from megacompile import notices
from megacompile.errors import DiskError
from megacompile.text import format_bytes

_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of fallocate(2)


@dataclass(frozen=True, slots=True)
class Place:
    """A range of bytes in a scratch file.

    `take` returns aligned places. Unaligned parts of them go through the page cache.
    """

    at: int
    size_bytes: int


class ScratchFile:
    """An unnamed file in a folder.

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
        """Open the file for direct I/O; see [Note: direct I/O].

        Raises:
            OSError: the file system does not support it, or its reads and writes are not coherent
                with mappings of the file.
        """
        direct = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT)
        weakref.finalize(self, os.close, direct)
        place = self.take(self.alignment)
        try:
            if not _is_coherent(self.fd, direct, place):  # or reads and writes may be refused
                raise OSError("direct reads and writes are not coherent with mappings of the file")
        finally:
            self.give_back(place)
        return direct

    def round_up(self, size_bytes: int) -> int:
        """The allocated size for this many bytes."""
        return max(-(-size_bytes // self.alignment), 1) * self.alignment

    def take(self, size_bytes: int) -> Place:
        """Allocate a place of at least this many bytes, filled with zeros.

        Raises:
            DiskError: the disk is full, or the limit is reached.
        """
        self._collect()
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
        """Check that this many bytes could be allocated, without allocating them.

        Raises:
            DiskError: as `take`.
        """
        self._collect()
        self._check_limit(size_bytes)
        if size_bytes > shutil.disk_usage(self.folder).free:
            raise self._full(errno.ENOSPC, size_bytes)

    def _check_limit(self, size: int) -> None:
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
        """A place that was given back, or one at the end of the file."""
        with contextlib.suppress(KeyError, IndexError):
            return self._free[size].popleft()
        at = self._end  # no call between these two lines, so threads do not switch there
        self._end = at + size
        return Place(at, size)

    def give_back(self, place: Place) -> None:
        """Free a place. Finalizers call this too, possibly in the middle of `take`."""
        if os.getpid() == self.process:
            self._given_back.append(place)

    def _collect(self) -> None:
        """Deallocate the places that were given back."""
        with contextlib.suppress(IndexError):  # empty
            while True:
                place = self._given_back.popleft()
                self.used_bytes -= place.size_bytes
                if _punch(self.fd, place):  # otherwise not reused: it would not read as zeros
                    self._keep(place)

    def _keep(self, place: Place) -> None:
        self._free.setdefault(place.size_bytes, deque()).append(place)


def _punch(fd: int, place: Place) -> bool:
    """Deallocate the blocks of a place; returns False if this is not supported."""
    span = (ctypes.c_int64(place.at), ctypes.c_int64(place.size_bytes))
    return bool(ctypes.CDLL(None).fallocate(fd, _PUNCH_HOLE, *span) == 0)


def _is_coherent(fd: int, direct: int, place: Place) -> bool:
    """True if direct I/O reads values written through a mapping, and the reverse."""
    with (
        mmap.mmap(fd, place.size_bytes, offset=place.at) as shared,
        mmap.mmap(-1, place.size_bytes) as memory,
    ):
        for value in range(1, 4):
            shared[:] = bytes([value]) * place.size_bytes
            os.preadv(direct, [memory], place.at)
            if memory[:] != shared[:]:
                return False
            memory[:] = bytes([value + 100]) * place.size_bytes
            os.pwritev(direct, [memory], place.at)
            if memory[:] != shared[:]:
                return False
    return True
