"""Memory of a host that several ranks map: one file, in which each has the same place.

The file has no name (memfd): the first rank of those that shard makes it, the others open it as
/proc/PID/fd/N, and the system frees it when no process has it any more, however they end. A file in
/dev/shm would have a name until all have opened it, and the size of that file system as a limit.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megacompile.errors import HostMemoryError
from megacompile.ir.collectives import Collectives
from megacompile.page_locks import PAGE_LOCKS
from megacompile.runtime.device import forks
from megacompile.runtime.device.buffers import HostBuffer, SharedFile
from megacompile.runtime.device.rank_notes import namespace
from megacompile.runtime.device.ranks import Ranks

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says of a file that it has made."""

    where: str  # processes of another name cannot open it
    pid: int
    fd: int
    nonce: int
    error: str = ""


class SharedBuffer(HostBuffer):
    """A place of a file that other processes map too, page-locked when it is settled.

    Args:
        gone: called at its end; is this the last process that had it?
    """

    def __new__(
        cls, file: SharedFile, at: int, size_bytes: int, gone: Callable[[], bool]
    ) -> SharedBuffer:
        del gone
        size = max(size_bytes, mmap.PAGESIZE)
        made = mmap.mmap.__new__(cls, -1, size, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        made._process, made._file = os.getpid(), file
        if not made._map(mmap.MAP_SHARED, at):
            raise HostMemoryError(
                "megacompile(): the system does not map memory that ranks share; give "
                "whole_buckets=False, and buckets are gathered"
            )
        made._at = at
        if hasattr(mmap, "MADV_HUGEPAGE"):
            made.madvise(mmap.MADV_HUGEPAGE)
        forks.tell(made)
        return made

    def __init__(
        self, file: SharedFile, at: int, size_bytes: int, gone: Callable[[], bool]
    ) -> None:
        del file, at, size_bytes
        self.private, self.is_shared = False, True
        self._gone = gone

    def settle(self) -> None:
        """Page-lock it, which gives the rows of others their pages. Nothing is written to these:
        their ranks do that at the same time."""
        self.lock()

    def __del__(self) -> None:
        if self._address:
            PAGE_LOCKS.unlock(self._address)
        if self._at is not None and self._process == os.getpid() and self._gone():
            self.madvise(mmap.MADV_REMOVE)  # of the file, which would keep it


def why_not_shared(ranks: Ranks) -> str:
    """Why ranks cannot map memory together; "" if they can. A collective of all of the mesh."""
    return shared_file(ranks, {})[1]


def shared_file(ranks: Ranks, sizes: Mapping[int, int]) -> tuple[SharedFile | None, str]:
    """The file that the first of the ranks that shard has made, or why some rank has none."""
    flat, mine = ranks.mesh.mesh.flatten().tolist(), ranks.mesh.get_rank()
    first = flat.index(mine) // ranks.count * ranks.count  # in the row of two dimensions
    made, said = _made(ranks, sizes)
    digest = hashlib.sha256(repr(sorted(sizes.items())).encode()).hexdigest()[:32]
    what = Collectives("memory that ranks share", ("which file it is",), f"shared-{digest}")
    told: list[_Said] = ranks.said(what, said)
    file, why = (made, said.error) if flat[first] == mine else _opened(told[first], flat[first])
    for rank, other in zip(flat, ranks.said(what, why), strict=True):
        if other:
            return None, f"rank {rank} cannot share memory with the ranks of other rows: {other}"
    return file, ""


def layout(count: int, sizes: Mapping[int, int]) -> tuple[int, dict[int, int], int]:
    """Bytes of the counters, where each bucket begins, and bytes of all."""
    control = _pages(WORD_BYTES * (1 + count * (2 + 3 * len(sizes))))
    at, end = {}, control
    for key, size in sizes.items():
        at[key] = end
        end += _pages(size)
    return control, at, end


_HUGE_PAGE = 2 * 2**20


def _pages(size_bytes: int) -> int:
    return max(1, -(-size_bytes // _HUGE_PAGE)) * _HUGE_PAGE


def _made(ranks: Ranks, sizes: Mapping[int, int]) -> tuple[SharedFile | None, _Said]:
    """A file, in the first rank of those that shard."""
    nonce = secrets.randbits(62)
    if ranks.rank:
        return None, _Said("", 0, 0, 0)
    file = SharedFile()
    _, _, end = layout(ranks.count, sizes)
    if file.fd is None or file.take(end) is None:
        return None, _Said("", 0, 0, 0, "the system gives no file in memory of that size")
    os.pwrite(file.fd, struct.pack("q", nonce), 0)
    return file, _Said(namespace(), os.getpid(), file.fd, nonce)


def _opened(said: _Said, rank: int) -> tuple[SharedFile | None, str]:
    """The file of another rank, or why it cannot be opened."""
    if said.error:
        return None, ""  # that one says so
    if not said.where or said.where != namespace():
        return None, f"rank {rank} is on another host, or in another container"
    try:
        fd = os.open(f"/proc/{said.pid}/fd/{said.fd}", os.O_RDWR)
    except OSError as error:
        return None, f"it cannot open a file of rank {rank}: {error}"
    file = SharedFile(fd)
    if os.pread(fd, WORD_BYTES, 0) != struct.pack("q", said.nonce):
        return None, f"it finds another file than that of rank {rank}"
    return file, ""
