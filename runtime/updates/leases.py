"""Leases of page-locked buffers for a bucket's data on a disk.

See [Note: no deadlock] in `runtime/device/pool.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch

from megacompile.errors import OptimizerError
from megacompile.runtime.device.background import OVER, Completion
from megacompile.runtime.device.buffers import DiskBuffer
from megacompile.runtime.device.pool import Buffer, HostBudget, Lease, Lender
from megacompile.runtime.disk.transfers import FileSpan, Request
from megacompile.runtime.params.host_bucket import HostBucket


class BucketLease(Lease):
    """A lease with memory for several disk ranges of a bucket, one after another; `after` are the
    last writes of these ranges."""

    def __init__(
        self,
        pool: BucketBuffers,
        host: HostBucket,
        places: Sequence[DiskBuffer],
        after: Sequence[Completion] = (),
        *,
        prefetch: bool = False,
    ) -> None:
        self._offsets = list(itertools.accumulate(map(len, places), initial=0))
        super().__init__(pool, self._offsets[-1], after)
        self.host = host
        self.places = tuple(places)
        self.prefetch = prefetch  # True: the issuing thread waits for it; False: for an update
        self.ready = Completion(future=Future())  # without a read: set when lent
        self.write: Request | None = None  # the buffer is free after it
        self.given_up = False
        self._starts = [torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in places]

    @property
    def read(self) -> Request | None:
        """The read that fills the buffer, if there is one."""
        return self.ready if isinstance(self.ready, Request) else None

    def place(self, i: int = 0) -> torch.Tensor:
        """The memory for a disk range: flat, uint8."""
        return self.bytes()[self._offsets[i] : self._offsets[i + 1]]

    def spans(self) -> list[FileSpan]:
        """The disk ranges with their memory."""
        return [place.span(functools.partial(self.place, i)) for i, place in enumerate(self.places)]

    def wait(self) -> None:
        """Wait until the buffer is filled.

        Raises:
            OptimizerError: the previous update, its write, or the run that requested the lease
                failed.
        """
        try:
            super().wait()
        except Exception:
            if self.prefetch and not self.given_up:
                self.host.pending.wait()  # it fails too: report the error only once
            raise
        if self.given_up:
            raise self.cut_off()

    def cut_off(self) -> OptimizerError:
        """The error for waiters of a cancelled lease."""
        name = self.host.layout.name
        return OptimizerError(f"the run that read {name!r} from a disk has failed")

    def begin(self, error: BaseException | None) -> None:
        """Start the read or complete the lease; with an error, fail it. Called by the pool's
        thread."""
        self.after = ()
        if self.read is None:
            future = self.ready.future
            assert future is not None
            future.set_result(None) if error is None else future.set_exception(error)
        elif error is None:
            self.read.begin()
        else:
            self.read.call_off(error)

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """The in-memory copy of a tensor on the disk; any other tensor unchanged."""
        address = value.data_ptr()
        for i, (start, place) in enumerate(zip(self._starts, self.places, strict=True)):
            at = address - start
            if self.buffer is not None and value.numel() and 0 <= at < len(place):
                whole = torch.empty(0, dtype=value.dtype)
                storage = torch.frombuffer(self.buffer.memory, dtype=torch.uint8).untyped_storage()
                element = (self._offsets[i] + at) // value.itemsize
                return whole.set_(storage, element, value.shape, value.stride())
        return value


class BucketBuffers(Lender):
    """A fixed number of buffers for leases of one kind, lent in order.

    Each fits the largest bucket from the start: growing a buffer would need the memory of both,
    because the old one may still be in use.

    `what` names the buffers' content in errors; for the others see `Lender`.
    """

    def __init__(self, device: torch.device, name: str, what: str, budget: HostBudget) -> None:
        super().__init__(name, device, budget)
        self.what = what
        self.count = self.size_bytes = 0
        self.written_bytes = 0  # bytes written so far
        self._reserved = (0, 0)  # number of buffers with memory, and bytes per buffer
        self._free: deque[Buffer | None] = deque()  # None: no memory yet
        self._waiting: deque[BucketLease] = deque()
        self._live: dict[int, BucketLease] = {}

    def require(self, count: int, size_bytes: int = 0) -> None:
        """Provide at least this many buffers, each at least this large."""
        if size_bytes < self.size_bytes:
            self._thread.submit(functools.partial(self._shrink, size_bytes))
        self.size_bytes = size_bytes or self.size_bytes
        while self.count < count:
            self._free.append(None)
            self.count += 1

    def reserve(self) -> None:
        """Allocate all missing buffers before a step changes anything.

        Raises:
            HostMemoryError: too little host memory.
        """
        if (wanted := (self.count, self.size_bytes)) == self._reserved or not self.size_bytes:
            return
        self._thread.call(self._reserve)
        self._reserved = wanted

    def of(self, host: HostBucket) -> BucketLease | None:
        """The last lease of a bucket that is neither written nor returned."""
        for lease in reversed(list(self._live.values())):
            written = lease.write is not None and lease.write.done()
            if lease.host is host and not written:
                return lease
        return None

    def lend(self, lease: BucketLease, read: Request | None = None) -> None:
        """Lend the next buffer and start the read into it."""
        if read is not None:
            read.held = True
            lease.ready = read
        self._live[id(lease)] = lease
        self._thread.submit(functools.partial(self._lend, lease))

    def write(self, lease: BucketLease, request: Request) -> None:
        """Return the buffer once a write of its content has completed."""
        # first, because a lease with a write is not given up
        request.at_end = lease.release
        lease.write = request
        self.written_bytes += request.size_bytes

    def take_back(self, lease: Lease, used: Completion | None) -> None:
        assert isinstance(lease, BucketLease)
        self._thread.submit(functools.partial(self._take_back, lease, used or OVER))

    def unwritten(self) -> list[BucketLease]:
        """Leases, lent or waiting, without a write that returns them."""
        return [lease for lease in list(self._live.values()) if lease.write is None]

    def give_up(self, left: Iterable[BucketLease]) -> None:
        """Cancel leases of a failed run, when no copy uses them."""
        self._thread.call(functools.partial(self._give_up, left))

    # Only the pool's thread runs the following methods; Ctrl-C does not interrupt it.

    def _take_back(self, lease: BucketLease, used: Completion) -> None:
        if self._live.pop(id(lease), None) is None:
            return
        buffer, lease.buffer = lease.buffer, None  # the lease's holder must not keep it alive
        if buffer is not None:
            buffer.used = used
            self._free.append(buffer)
            del buffer
            self._shrink(self.size_bytes)
            self._lend()

    def _shrink(self, size_bytes: int) -> None:
        """Free buffers that are larger than any remaining bucket needs."""
        for at, buffer in enumerate(list(self._free)):  # `require` adds to its end
            if buffer is not None and buffer.size_bytes > size_bytes:
                buffer.used.wait()
                self._free[at] = None

    def _give_up(self, left: Iterable[BucketLease]) -> None:
        for lease in left:
            lease.given_up = True
            if lease in self._waiting:
                self._waiting.remove(lease)
                lease.begin(lease.cut_off())
            elif lease.read is not None and lease.buffer is not None:
                lease.read.finish()
            self._take_back(lease, OVER)

    def _lend(self, *new: BucketLease) -> None:
        self._waiting += new
        while self._waiting and self._free:
            lease, error = self._waiting[0], None
            try:
                for work in lease.after:
                    work.wait()
                lease.buffer = self._take(lease)
            except BaseException as failed:
                error = failed
            self._waiting.popleft()
            lease.begin(error)

    def _reserve(self) -> None:
        for at in range(len(self._free)):
            self._fitting(at, self.size_bytes, f"a buffer for {self.what} on a disk")

    def _fitting(self, at: int, size_bytes: int, what: str) -> Buffer:
        """The free buffer at a position. One that is too small is freed before its successor is
        allocated."""
        buffer = self._free[at]
        if buffer is None or buffer.size_bytes < size_bytes:
            if buffer is not None:
                buffer.used.wait()
            self._free[at] = buffer = None
            self._free[at] = buffer = self._new(max(size_bytes, self.size_bytes), what)
        return buffer

    def _take(self, lease: BucketLease) -> Buffer:
        """A free buffer, preferably one that no copy uses."""
        free = (i for i, b in enumerate(list(self._free)) if b is None or b.used.done())
        at = next(free, 0)  # `require` adds to its end
        del free  # it holds the buffers
        what = f"a buffer for the {self.what} of {lease.host.layout.name!r} on a disk"
        buffer = self._fitting(at, lease.size_bytes, what)
        buffer.used.wait()
        del self._free[at]
        return buffer
