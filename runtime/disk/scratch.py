"""A file on a disk that no other process sees, and the places in it.

It has no name (`O_TMPFILE`, or unlinked at once), so the system frees it when this process and the
children that it forked have ended, whatever way they end. A place is allocated when it is taken:
a full disk is found then, and not in the middle of a step. New places read as zeros.

[Note: direct I/O] Reads and writes of a step go past the page cache (`O_DIRECT`): disk= is to save
host memory, and a copy through the cache costs the CPU more than the disk takes. A file system that
refuses it (some network and FUSE ones) is read and written through the cache, and asked to drop the
pages after that.

[Note: coherence] A reader of what is in a place reads it through a shared mapping
(`runtime/device/disk_buffers.py`), that is, through the page cache. Linux keeps the cache and
direct I/O together within a page: before a direct read or write it writes back what is dirty there,
and a direct write drops the pages, also from page tables, before and after. It gives up on that
only while another access touches the same page at the same time, which the guards of states exclude
(`runtime/params/guards.py`). So places begin and end at page boundaries, and nothing has to be
synced by hand. A file system that promises less (O_DIRECT is not in POSIX) is found by
`_is_coherent`, which tries it, and gets no direct I/O.
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
    """A range of bytes of a scratch file.

    Those that `take` returns are aligned. Parts of them need not be: they go through the page
    cache.
    """

    at: int
    size_bytes: int


class ScratchFile:
    """An unnamed file in a folder.

    Args:
        folder: on the disk. It must be there.
        limit_bytes: that all places together may take; None: what is free.

    Raises:
        DiskError: there is no such folder, or no file can be made in it.
    """

    def __init__(self, folder: str | os.PathLike[str], *, limit_bytes: int | None = None) -> None:
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.process = os.getpid()
        self._end = 0
        self._free: deque[Place] = deque()  # each is whose who pops it: several threads take places
        self._given_back: deque[Place] = deque()
        try:
            self.fd = _unnamed(self.folder)
        except OSError as error:
            raise DiskError(
                error.errno or errno.EIO,
                f"disk={str(folder)!r}: no file can be made there ({error.strerror or error}); "
                "needed a folder that this process can write to, on a local disk",
            ) from error
        self._close = weakref.finalize(self, os.close, self.fd)
        self.direct_fd: int | None = None
        self.alignment = _alignment(self.fd)
        self._try_direct()

    def _try_direct(self) -> None:
        """See [Note: direct I/O]."""
        try:
            direct = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT)
        except (AttributeError, OSError) as error:  # AttributeError: not Linux
            self._say_buffered(str(error))
            return
        place = self.take(self.alignment)
        try:
            coherent = _is_coherent(self.fd, direct, place)
        except OSError as error:  # taken when it is opened, refused when it is used
            coherent, why = False, error.strerror or str(error)
        else:
            why = "its direct reads and writes do not go with mappings of the same file"
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
            "go through the page cache, which takes host memory and time of the CPU; use a folder "
            "on a local file system (ext4, xfs, btrfs)",
            notices.Whose.HOST,
        )

    def round_up(self, size_bytes: int) -> int:
        """Bytes that so many bytes take on the disk."""
        return max(-(-size_bytes // self.alignment), 1) * self.alignment

    def take(self, size_bytes: int) -> Place:
        """A new place of at least so many bytes, zeros, which the disk has.

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
        """Is there place for so many bytes? Nothing is taken.

        Raises:
            DiskError: there is not.
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
                f"{format_bytes(self.used_bytes)} lie in {self.folder}, and {format_bytes(size)} "
                "more are needed; raise disk_memory=",
            )

    def _full(self, number: int, size: int) -> DiskError:
        return DiskError(
            number,
            f"disk={str(self.folder)!r} has no place for {format_bytes(size)} more "
            f"({os.strerror(number)}; {format_bytes(self.used_bytes)} of megacompile's lie there, "
            f"and {format_bytes(shutil.disk_usage(self.folder).free)} are free); free space there, "
            "or name a folder on a larger disk",
        )

    def _find(self, size: int) -> Place:
        """A hole, or a place after the end."""
        holes = self._pop_holes()
        for i, hole in enumerate(holes):
            if hole.size_bytes >= size:
                rest = Place(hole.at + size, hole.size_bytes - size)
                holes[i : i + 1] = [rest] if rest.size_bytes else []
                self._free.extend(holes)
                return Place(hole.at, size)
        self._free.extend(holes)
        at = self._end  # no call comes before the next line, in which the system could switch
        self._end = at + size
        return Place(at, size)

    def _pop_holes(self) -> list[Place]:
        """Those that no other thread looks at."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._free.popleft())
        return found

    def give_back(self, place: Place) -> None:
        """Free a place: from a finalizer too, which may run in the middle of `take`."""
        if os.getpid() == self.process:
            self._given_back.append(place)

    def _collect(self) -> None:
        """Return to the disk what was given back."""
        with contextlib.suppress(IndexError):  # it is empty
            while True:
                place = self._given_back.popleft()
                self.used_bytes -= place.size_bytes
                if _punch(self.fd, place):  # else it would not read as zeros: it is not used again
                    self._free.append(place)
        merged: list[Place] = []
        for hole in sorted(self._pop_holes(), key=lambda hole: hole.at):
            if merged and merged[-1].at + merged[-1].size_bytes == hole.at:
                last = merged.pop()
                hole = Place(last.at, last.size_bytes + hole.size_bytes)
            merged.append(hole)
        self._free.extend(merged)


def _unnamed(folder: Path) -> int:
    """A file in a folder without a name."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is not None:
        with contextlib.suppress(OSError):  # file systems that have no such files
            return os.open(folder, flag | os.O_RDWR, 0o600)
    fd, name = tempfile.mkstemp(prefix=".megacompile-", dir=folder)
    os.unlink(name)
    return fd


def _allocate(fd: int, place: Place) -> None:
    """Have the disk reserve a place."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, place.at, place.size_bytes)
    else:  # macOS
        os.ftruncate(fd, max(os.fstat(fd).st_size, place.at + place.size_bytes))


def _punch(fd: int, place: Place) -> bool:
    """Give a place's memory back to the disk; False where that cannot be."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, place.at, place.size_bytes) == 0)


_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_SAID: set[int] = set()  # devices without direct I/O


def _alignment(fd: int) -> int:
    """The alignment of offsets, lengths and addresses: pages, and what the disk asks for."""
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
    """True if what is written through a mapping comes back by direct I/O, and the other way
    round."""
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
    """The type of file system that a path is on: "ext4"; "" where that is not known."""
    try:
        device = os.stat(path).st_dev
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        before, _, behind = line.partition(" - ")
        if before.split()[2] == name:
            return behind.split()[0]
    return ""
