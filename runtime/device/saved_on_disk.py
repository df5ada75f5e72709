"""Saved tensors that are on a disk between a forward and its backward.

    OnHost     filled from the device; its buffer is free when it is written
    OnDisk     its copy in the scratch file, which the forward hands to the backward
    ReadBack   that copy in another buffer, which is free after the copy to the device

Only a step sees these, so there is no mapping of their places, unlike `DiskBuffer`s. Places
are lent again: to allocate one takes the file system's time, and new ones are slower to write.

[Note: who keeps what] A forward may be given up, and its values die, while threads still write
them. Until it is over, a request holds the buffer and the place that it works on. They go back when
no other code has them either.

[Note: no waiting in threads of the disk] A read is begun when its write is over and its buffer is
free. A thread of the disk that waited there could wait for itself (decision 30), so a thread of its
own does. A write may wait there, for a copy from the device: that needs nothing which is issued
later.
"""

from __future__ import annotations

import errno
import functools
import os
import threading

import torch

from megacompile.errors import DiskError
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.activations import HostPool, OnHost, Reused, empty
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.disk_buffers import Disk
from megacompile.runtime.disk.scratch import Place, ScratchFile
from megacompile.runtime.disk.transfers import FileSpan, Request, Way


class SavedDisk:
    """The saved tensors of one model on a disk.

    Args:
        disk: with the scratch file.
        pool: of the host memory that they pass through.
    """

    def __init__(self, disk: Disk, pool: HostPool) -> None:
        self.disk = disk
        self.pool = pool
        self.places = _FilePlaces(disk.file)
        self.read_bytes = self.written_bytes = 0  # so far
        self.thread = Background("megacompile-saved")  # begins reads

    @property
    def ours(self) -> bool:
        """Is it this process that has the file? A child of a fork keeps its own on the host."""
        return self.disk.file.process == os.getpid()


class OnDisk:
    """A tensor's copy on the disk; implements `streams.Completion`.

    Args:
        what: for errors: "3WRITE_SAVED of 'layers.3'".
    """

    meta: TensorMeta  # when it is begun

    def __init__(self, store: SavedDisk, what: str) -> None:
        self.store = store
        self.what = what
        self.kept: OnHost | None = None  # in a child of a fork
        self.place: _Lent | None = None
        self.request: Request | None = None
        self._process = os.getpid()
        self._source: OnHost | None = None
        self._begun = threading.Event()

    def write(self, source: OnHost) -> Request | None:
        """Begin to write what is there when `source.ready` is; None in a child of a fork.

        Raises:
            DiskError: the disk is full.
        """
        self.meta, store = source.meta, self.store
        if store.ours:
            self.place = _lent(store.places, source.size_bytes, self.what)
            spans = self.place.spans(source)
            before = functools.partial(_behind, source.ready, self.place)
            self.request = store.disk.request(Way.WRITE, spans, self.what, before=before)
            self.request.when_done(source.release)
            self._source = source
            store.written_bytes += self.request.size_bytes
            self.request.begin()
        else:
            self.kept = source
        self._begun.set()
        return self.request

    def done(self) -> bool:
        """True if it is written."""
        return self._begun.is_set() and (self.request is None or self.request.done())

    def wait(self) -> None:
        """Wait until it is written, and its buffer is free.

        Raises:
            DiskError: it could not be.
        """
        self._begun.wait()
        if self.request is not None:
            self.request.wait()
        if self._source is not None:
            self._source.release()  # who writes it may be late with that

    def empty(self) -> torch.Tensor:
        """A buffer for the tensor on its device, of the same strides."""
        return empty(self.meta)

    def check(self, what: str) -> None:
        """Raise in a child of a fork, for what its parent has written.

        Raises:
            DiskError: with what to do.
        """
        if self.kept is None and self._process != os.getpid():
            raise DiskError(
                errno.EOWNERDEAD,
                f"{what}: what a forward has left on the disk is for the process that ran it, and "
                "this is a child of that; run the forward in the child too",
            )

    def to_host(self) -> OnHost:
        """The tensor in host memory, at once."""
        if self.kept is not None:
            return self.kept
        back = ReadBack(self, self.what.replace("WRITE", "READ"))
        back.begin()
        back.wait()
        return back


class ReadBack(OnHost):
    """A copy on the host for one fetch, read from the disk: a `Completion`.

    Args:
        what: for errors: "3READ_SAVED of 'layers.3'".

    Raises:
        DiskError: this is a child of a fork, and its parent has it.
    """

    def __init__(self, on_disk: OnDisk, what: str) -> None:
        super().__init__(on_disk.store.pool, on_disk.meta)
        on_disk.check(what)
        self.on_disk = on_disk
        self.what = what
        self.request: Request | None = None
        self._error: BaseException | None = None  # of the write
        self._begun = threading.Event()

    def begin(self) -> Request:
        """Reads it, when its write is over and its buffer is not read any more."""
        store, lent = self.on_disk.store, self.on_disk.place
        assert lent is not None
        self.buffer = self.pool.lend(self.size_bytes)
        disk, spans = store.disk, lent.spans(self)
        self.request = disk.request(Way.READ, spans, self.what, before=lambda: None)
        store.read_bytes += self.request.size_bytes
        store.thread.submit(self._read)
        return self.request

    def _read(self) -> None:
        """By the thread; see [Note: no waiting in threads of the disk]."""
        assert self.request is not None
        try:
            self.on_disk.wait()
            for event in self.buffer.events():
                event.synchronize()
        except BaseException as error:
            self._error = error
            self.request.call_off()
        else:
            self.request.begin()
        self._begun.set()

    def done(self) -> bool:
        """True if it is read."""
        return self._begun.is_set() and (self.request is None or self.request.done())

    def wait(self) -> None:
        """Wait until it is there.

        Raises:
            DiskError: it could not be written, or read.
        """
        self._begun.wait()
        if self._error is not None:
            raise self._error
        assert self.request is not None
        self.request.wait()

    def copy_to(self, buffer: torch.Tensor, queue: torch.cuda.Stream | None) -> torch.Tensor:
        """Copy it into `buffer`; its own is free after that."""
        self.buffer.filled = None
        super().copy_to(buffer, queue)
        self.release()
        return buffer


class _FilePlaces(Reused[Place]):
    """Places of the scratch file that are lent to one tensor after the other."""

    def __init__(self, file: ScratchFile) -> None:
        super().__init__()
        self.file = file

    def _make(self, size_bytes: int) -> Place:
        try:
            return self.file.take(size_bytes)
        except DiskError:
            self.forget()  # of other sizes
            return self.file.take(size_bytes)

    def _drop(self, piece: Place) -> None:
        self.file.give_back(piece)


class _Lent:
    """A place, until the last reference to this is gone."""

    def __init__(self, places: _FilePlaces, size_bytes: int) -> None:
        self.places = places
        self.place = places.lend(places.file.round_up(size_bytes))

    def spans(self, on_host: OnHost) -> list[FileSpan]:
        """The whole pages of a tensor, which go past the page cache, and the rest of it."""
        size, unit = on_host.size_bytes, self.places.file.alignment
        whole, at = size // unit * unit, self.place.at
        return [
            FileSpan(Place(at + begin, end - begin), functools.partial(on_host.bytes, begin, end))
            for begin, end in ((0, whole), (whole, size))
            if begin < end
        ]

    def __del__(self) -> None:
        if hasattr(self, "place"):
            self.places.give_back(self.place)


def _lent(places: _FilePlaces, size_bytes: int, what: str) -> _Lent:
    try:
        return _Lent(places, size_bytes)
    except DiskError as error:
        raise DiskError(error.errno, f"{what}: {error}") from error


def _behind(ready: torch.cuda.Event | None, lent: _Lent) -> None:
    """Wait for a copy from the device; the request has the place as long as it has this."""
    del lent
    if ready is not None:
        ready.synchronize()
