"""A private file on a disk, and allocation of byte ranges (places) in it.

The file has no name (`O_TMPFILE`, or unlinked after creation), so the system frees it when this
process and its forked children have ended, even if they are killed. Taking a place allocates its
blocks, so a full disk is detected there, not in the middle of a step. New places read as zeros.

[Note: direct I/O] Reads and writes of a step bypass the page cache (`O_DIRECT`): disk= is meant to
save host memory, and copying through the cache takes the CPU longer than the transfer takes the
disk. If the file system does not support it (some network and FUSE ones), reads and writes use the
cache, and the system is asked to drop the pages afterwards.

[Note: coherence] User code reads places through a shared mapping
(`runtime/device/disk_buffers.py`), that is, through the page cache. Linux keeps the cache coherent
with direct I/O: it writes back dirty pages before a direct read or write, and a direct write drops
the pages, including from page tables, before and after. This fails only for concurrent accesses to
the same page, which the guards of states exclude (`runtime/params/guards.py`). So places are
page-aligned, and no explicit sync is needed. POSIX does not define O_DIRECT; `_is_coherent` tests
it, and direct I/O is disabled on file systems that fail the test.
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

    def __init__(self, folder: str | os.PathLike[str], *, limit_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.process = os.getpid()
        self._end = 0
        self._free: deque[Place] = deque()  # thread-safe: popping a place claims it
        self._given_back: deque[Place] = deque()
        try:
            self.fd = _unnamed(self.folder)
        except OSError as error:
            raise DiskError(
                error.errno or errno.EIO,
                f"disk={str(folder)!r}: no file can be created there ({error.strerror or error}); "
                "needed a folder that this process can write to, on a local disk",
            ) from error
        self._close = weakref.finalize(self, os.close, self.fd)
        self.direct_fd: int | None = None
        self.alignment = _alignment(self.fd)
        self._try_direct()

    def _try_direct(self) -> None:
        """Open the file for direct I/O, if the file system supports it; see [Note: direct I/O]."""
        try:
            direct = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT)
        except (AttributeError, OSError) as error:  # AttributeError: not Linux
            self._say_buffered(str(error))
            return
        place = self.take(self.alignment)
        try:
            coherent = _is_coherent(self.fd, direct, place)
        except OSError as error:  # O_DIRECT may be accepted by open() and rejected by reads
            coherent, why = False, error.strerror or str(error)
        else:
            why = "direct reads and writes are not coherent with mappings of the file"
        finally:
            self.give_back(place)
        if coherent:
            self.direct_fd = direct
            weakref.finalize(self, os.close, direct)
        else:
            os.close(direct)
            self._say_buffered(why)

    def _say_buffered(self, why: str) -> None:
        device = os.fstat(self.fd).st_dev
        if device in _SAID:
            return
        _SAID.add(device)
        notices.warn(
            f"megacompile: disk={str(self.folder)!r} has no direct I/O ({why}): reads and writes "
            "go through the page cache, which takes host memory and CPU time; use a folder on a "
            "local file system (ext4, xfs, btrfs)",
            notices.Whose.HOST,
        )

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
            _allocate(self.fd, place)
        except OSError as error:
            self._free.append(place)
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
        """A place in a hole, or at the end of the file."""
        holes = self._pop_holes()
        for i, hole in enumerate(holes):
            if hole.size_bytes >= size:
                rest = Place(hole.at + size, hole.size_bytes - size)
                holes[i : i + 1] = [rest] if rest.size_bytes else []
                self._free.extend(holes)
                return Place(hole.at, size)
        self._free.extend(holes)
        at = self._end  # no call between these two lines, so threads do not switch there
        self._end = at + size
        return Place(at, size)

    def _pop_holes(self) -> list[Place]:
        """Claim all holes that no other thread has claimed."""
        holes = []
        with contextlib.suppress(IndexError):
            while True:
                holes.append(self._free.popleft())
        return holes

    def give_back(self, place: Place) -> None:
        """Free a place. Finalizers call this too, possibly in the middle of `take`."""
        if os.getpid() == self.process:
            self._given_back.append(place)

    def _collect(self) -> None:
        """Deallocate the places that were given back, and merge adjacent holes."""
        with contextlib.suppress(IndexError):  # empty
            while True:
                place = self._given_back.popleft()
                self.used_bytes -= place.size_bytes
                if _punch(self.fd, place):  # otherwise not reused: it would not read as zeros
                    self._free.append(place)
        merged: list[Place] = []
        for hole in sorted(self._pop_holes(), key=lambda hole: hole.at):
            if merged and merged[-1].at + merged[-1].size_bytes == hole.at:
                last = merged.pop()
                hole = Place(last.at, last.size_bytes + hole.size_bytes)
            merged.append(hole)
        self._free.extend(merged)


def _unnamed(folder: Path) -> int:
    """Create an unnamed file in a folder; returns its descriptor."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is not None:
        with contextlib.suppress(OSError):  # some file systems do not support it
            return os.open(folder, flag | os.O_RDWR, 0o600)
    fd, name = tempfile.mkstemp(prefix=".megacompile-", dir=folder)
    os.unlink(name)
    return fd


def _allocate(fd: int, place: Place) -> None:
    """Allocate the blocks of a place on the disk."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, place.at, place.size_bytes)
    else:  # macOS
        os.ftruncate(fd, max(os.fstat(fd).st_size, place.at + place.size_bytes))


def _punch(fd: int, place: Place) -> bool:
    """Deallocate the blocks of a place; returns False if this is not supported."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, place.at, place.size_bytes) == 0)


_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_SAID: set[int] = set()  # devices that were warned about


def _alignment(fd: int) -> int:
    """The alignment of offsets, lengths and addresses: that of pages and of direct I/O."""
    least = max(_PAGE, mmap.PAGESIZE)
    status = (ctypes.c_uint32 * 64)()  # struct statx: 256 bytes
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return least
    if statx(fd, b"", _EMPTY_PATH, _DIOALIGN, ctypes.byref(status)) != 0:
        return least
    memory, offset = (status[38], status[39]) if status[0] & _DIOALIGN else (0, 0)
    return max(least, memory, offset)


_PAGE = 4096
_EMPTY_PATH, _DIOALIGN = 0x1000, 0x2000  # AT_EMPTY_PATH, STATX_DIOALIGN (Linux 6.1)


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


def kind_of(path: Path) -> str:
    """The type of a path's file system, such as "ext4"; "" if unknown."""
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        mount, _, system = line.partition(" - ")
        if mount.split()[2] == name:
            return system.split()[0]
    return ""
