"""Memory that is on a disk, with the interface of `HostBuffer`.

    other readers    a shared mapping of the range: an ordinary tensor, read by page faults
    the step         direct I/O of the same bytes, into and out of page-locked memory

[Note: coherence] in `runtime/disk/scratch.py` explains how the two stay consistent.

[Note: children] A child of a fork maps its ranges privately, like all of megacompile's memory (see
[Note: forks] in `buffers.py`): its writes are private and never reach the file. So its reads and
writes are memory copies from and to that mapping. The file exists until the last child has ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch

from megacompile.errors import DiskError
from megacompile.runtime.device import forks
from megacompile.runtime.device.buffers import HostBuffer, map_over
from megacompile.runtime.disk.scratch import Place, ScratchFile
from megacompile.runtime.disk.transfers import FileSpan, Request, Transfers, Way, nothing


class DiskBuffer(HostBuffer):
    """A mapped range of a scratch file, initially zero. It is freed with the last tensor on it.

    Args:
        size_bytes: size of the buffer, rounded up to the disk's I/O size.
        file: the scratch file.
    """

    file: ScratchFile  # the file that it is in
    _place: Place | None = None  # until a range is allocated, or if none is free

    def __new__(cls, size_bytes: int, file: ScratchFile) -> DiskBuffer:
        size = file.round_up(size_bytes)
        made = mmap.mmap.__new__(cls, -1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made.file = file
        made._process = os.getpid()
        made._place = file.take(size)
        made._map_file(mmap.MAP_SHARED)
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            made.madvise(mmap.MADV_SEQUENTIAL)  # reading all of it is twice as fast
        forks.tell(made)
        return made

    def _map_file(self, kind: int) -> None:
        assert self._place is not None
        start = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        number = map_over(start, len(self), kind, self.file.fd, self._place.at)
        if number:
            raise DiskError(
                number,
                f"disk={str(self.file.folder)!r}: mmap of {len(self)} bytes failed with errno "
                f"{number} ({os.strerror(number)}); needed a file system whose files can be "
                "mapped, and enough maps (sysctl vm.max_map_count)",
            )

    @property
    def ours(self) -> bool:
        """True if this process allocated the range. See [Note: children]."""
        return self._process == os.getpid()

    def span(self, memory: Memory) -> FileSpan:
        """The whole buffer, paired with the memory it is copied to or from."""
        assert self._place is not None
        return FileSpan(self._place, memory)

    def part(self, begin: int, end: int, memory: Memory) -> FileSpan:
        """The bytes from `begin` to `end`, paired with memory for the whole buffer."""
        assert self._place is not None and 0 <= begin < end <= len(self)
        place = Place(self._place.at + begin, end - begin)
        return FileSpan(place, lambda: memory()[begin:end])

    def lock(self) -> None:
        """Do nothing: file pages are not locked for a device."""

    def after_fork(self, *, in_child: bool) -> None:
        """See [Note: children]."""
        if in_child:
            self._map_file(mmap.MAP_PRIVATE)

    def __del__(self) -> None:
        if self._place is not None and self.ours:
            self.file.give_back(self._place)


Memory = Callable[[], torch.Tensor]  # returns (len(buffer),) uint8; see `Span`


class Disk:
    """The scratch file of a model, and the threads that read and write it.

    Args:
        file: the file that holds the buffers.
        transfers: threads for each direction. Default: its own.
    """

    def __init__(self, file: ScratchFile, transfers: Transfers | None = None) -> None:
        self.file = file
        self._transfers = Transfers() if transfers is None else transfers

    def buffer(self, size_bytes: int) -> DiskBuffer:
        """Allocate a new range of zeros.

        Raises:
            DiskError: the disk is full, or `disk_memory=` is used up.
        """
        return DiskBuffer(size_bytes, self.file)

    def request(
        self, way: Way, spans: Sequence[FileSpan], what: str, before: Callable[[], None] = nothing
    ) -> Request:
        """A read or a write of parts of this process's buffers, to `begin` later; see `Request`."""
        return self._transfers.request(way, self.file, spans, what, before)

    def read(
        self,
        buffers: Sequence[DiskBuffer],
        memory: Sequence[Memory],
        what: str,
        before: Callable[[], None] = nothing,
    ) -> Request | None:
        """A read of whole buffers, to `begin` later. In a child of a fork it is done at once, and
        None is returned.

        Args:
            memory: for each buffer, (len(buffer),) uint8 at a page boundary, not of a `DiskBuffer`.
        """
        if all(buffer.ours for buffer in buffers):
            return self.request(Way.READ, _spans(buffers, memory), what, before)
        before()
        for buffer, here in zip(buffers, memory, strict=True):
            here().copy_(torch.frombuffer(buffer, dtype=torch.uint8))
        return None

    def write(
        self,
        buffers: Sequence[DiskBuffer],
        memory: Sequence[Memory],
        what: str,
        before: Callable[[], None] = nothing,
    ) -> Request | None:
        """A write, like `read`. The buffers must not be read until it has finished."""
        if all(buffer.ours for buffer in buffers):
            return self.request(Way.WRITE, _spans(buffers, memory), what, before)
        before()
        for buffer, here in zip(buffers, memory, strict=True):
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(here())
        return None

    def moved_bytes(self, way: Way) -> int:
        """Bytes read or written so far, without accesses through mappings."""
        return self._transfers.moved_bytes(way)


def _spans(buffers: Sequence[DiskBuffer], memory: Sequence[Memory]) -> list[FileSpan]:
    return [buffer.span(target) for buffer, target in zip(buffers, memory, strict=True)]
