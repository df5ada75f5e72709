"""Host staging buffers for optimizer states and parameters on a disk.

Page-locked buffers are leased, each for one use of one bucket, from its read to the completion of
its write or of its copy to the device. There are three kinds with separate threads, because
different events free them; see [Note: no deadlock] in `runtime/device/pool.py`:

    states            a step reads states from the disk, updates and writes them; free after that
    for a prefetch    parameters from the disk; free after the copy to the device
    for an update     the host updates parameters from the disk, or the device copies new ones
                      here; free after the write to the disk

[Note: parts of a bucket] An update writes only the bytes that it has changed: frozen parameters may
share a page. Direct I/O writes whole pages; partial pages at both ends of a run of trained
parameters go through the page cache. See [Note: coherence] in `runtime/disk.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from megacompile.errors import DiskError, OptimizerError
from megacompile.ir.plan import Plan
from megacompile.runtime.device.background import OVER, Completion
from megacompile.runtime.device.buffers import DiskBuffer, HostBudget
from megacompile.runtime.device.pool import Buffer, Lease, Lender
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.disk import Disk, FileSpan, Request, Way
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.pending import InFlight

Parts = Sequence[tuple[int, int]]  # bytes of a bucket: from, to


class BucketLease(Lease):
    """A lease of memory for several disk ranges of a bucket, one after another; `after` has their
    last writes. `read` fills the memory; if it is empty, the device does."""

    read: Request
    write: Request | None = None  # the buffer is free after it
    given_up = False

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
        self.host, self.places = host, tuple(places)
        self.prefetch = prefetch  # True: the issuing thread waits for it; False: for an update
        self._starts = [torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in places]

    def place(self, i: int = 0) -> torch.Tensor:
        """The memory for a disk range: flat, uint8."""
        return self.bytes()[self._offsets[i] : self._offsets[i + 1]]

    def spans(self) -> list[FileSpan]:
        return [place.span(functools.partial(self.place, i)) for i, place in enumerate(self.places)]

    def wait(self) -> None:
        """Wait until the buffer is filled. Raises OptimizerError: the previous update, its write,
        or the run that requested the lease failed."""
        try:
            super().wait()
        except Exception:
            if self.prefetch and not self.given_up:
                self.host.pending.wait()  # it fails too: report the error only once
            raise
        if self.given_up:
            raise self.cut_off()

    def cut_off(self) -> OptimizerError:
        name = self.host.layout.name
        return OptimizerError(f"the run that read {name!r} from a disk has failed")

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
    """A fixed number of buffers for leases of one kind, lent in order. Each fits the largest bucket
    from the start: growing one would take both sizes, because the old one may still be in use.
    `what` names the buffers' content in errors; the other arguments are those of `Lender`."""

    def __init__(self, device: torch.device, name: str, what: str, budget: HostBudget) -> None:
        super().__init__(name, device, budget)
        self.what = what
        self.count = self.size_bytes = 0
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
        """Allocate all missing buffers before a step changes anything. Raises HostMemoryError: too
        little host memory."""
        if (wanted := (self.count, self.size_bytes)) == self._reserved or not self.size_bytes:
            return
        what = f"a buffer for {self.what} on a disk"
        self._thread.call(
            lambda: [self._fitting(at, self.size_bytes, what) for at in range(len(self._free))]
        )
        self._reserved = wanted

    def of(self, host: HostBucket) -> BucketLease | None:
        """The last lease of a bucket that is neither written nor returned."""
        for lease in reversed(list(self._live.values())):
            written = lease.write is not None and lease.write.done()
            if lease.host is host and not written:
                return lease
        return None

    def lend(self, lease: BucketLease, read: Request) -> BucketLease:
        """Lend the next buffer and start the read into it."""
        read.held = True
        lease.read = lease.ready = read
        self._live[id(lease)] = lease
        self._thread.submit(functools.partial(self._lend, lease))
        return lease

    def write(self, lease: BucketLease, request: Request) -> None:
        """Return the buffer once a write of its content has completed."""
        # first, because a lease with a write is not given up
        request.at_end = lease.release
        lease.write = request

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
                lease.read.call_off(lease.cut_off())
            elif lease.buffer is not None:
                lease.read.finish()
            self._take_back(lease, OVER)

    def _lend(self, *new: BucketLease) -> None:
        self._waiting += new
        while self._waiting and self._free:
            self._read(self._waiting[0], self._waiting[0].read)
            self._waiting.popleft()

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

    def _place(self, lease: BucketLease) -> None:
        """Take a free buffer, preferably one that no copy uses."""
        free = (i for i, b in enumerate(list(self._free)) if b is None or b.used.done())
        at = next(free, 0)  # `require` adds to its end
        del free  # it holds the buffers
        what = f"a buffer for the {self.what} of {lease.host.layout.name!r} on a disk"
        buffer = self._fitting(at, lease.size_bytes, what)
        buffer.used.wait()
        del self._free[at]
        lease.buffer = buffer


class Staging:
    """The staging buffers for the states and parameters of one model on a disk."""

    def __init__(self, disk: Disk, device: torch.device, budget: HostBudget) -> None:
        self.disk = disk
        self.device = device
        self.states = BucketBuffers(device, "megacompile-staging", "states", budget)
        self.prefetches = BucketBuffers(device, "megacompile-weights", "parameters", budget)
        self.updates = BucketBuffers(device, "megacompile-new-weights", "parameters", budget)

    def require(self, plan: Plan, hosts: Iterable[HostBucket]) -> None:
        """Provide as many buffers as a plan needs, for these buckets."""
        size = max((len(host.on_disk) for host in hosts if host.on_disk is not None), default=0)
        self.states.require(plan.state_sets, max(self.states.size_bytes, plan.state_set_bytes))
        self.prefetches.require(plan.weight_sets, size)
        self.updates.require(plan.new_weight_sets, size)

    def reserve(self, hosts: Iterable[HostBucket]) -> None:
        """Allocate the memory for an update of these buckets before it changes anything: running
        out of memory during it would leave them inconsistent. Plans that were made before the
        optimizer was known may have reserved too little. Raises HostMemoryError: too little host
        memory; nothing has changed."""
        sizes = [sum(map(len, host.states.on_disk())) for host in hosts]
        if any(sizes):
            self.states.size_bytes = max(self.states.size_bytes, *sizes)
            self.states.reserve()
        self.updates.reserve()

    def give_up(self) -> None:
        """Cancel the leases that a failed run will not write."""
        pools = (self.prefetches, self.updates, self.states)
        left = [(pool, leases) for pool in pools if (leases := pool.unwritten())]
        for lease in (lease for _, leases in left for lease in leases):
            lease.host.pending.is_torn()  # copies from the device may be in flight
        if left and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # and copies to it
        for pool, leases in left:
            pool.give_up(leases)

    def read_states(self, host: HostBucket, what: str) -> BucketLease | None:
        """Read a bucket's states into memory; None if none are on the disk."""
        buffers = host.states.on_disk()
        if not buffers:
            return None
        lease = BucketLease(self.states, host, buffers)
        return self.states.lend(lease, self.disk.request(Way.READ, lease.spans(), what))

    def read(
        self, host: HostBucket, params: Iterable[int] | None, after: Sequence[Handle], what: str
    ) -> BucketLease:
        """Read a bucket into memory: the parameters of a host update, or all, for a prefetch. The
        read waits for the handles in `after`; `what` names it in errors."""
        place, unit = place_of(host), self.disk.alignment
        parts: Parts = [(0, len(place))]
        if params is not None:
            parts = _joined(
                (begin // unit * unit, -(-end // unit) * unit) for begin, end in _runs(host, params)
            )
        pool = self.prefetches if params is None else self.updates
        writes = [h for h in after if not isinstance(h.value, Lease)]  # leases are ordered already
        waits = [h.host for h in writes if h.host is not None]
        lease = BucketLease(pool, host, [place], waits, prefetch=params is None)
        spans = [place.part(begin, end, lease.place) for begin, end in parts]
        return pool.lend(lease, self.disk.request(Way.READ, spans, what))

    def take(self, host: HostBucket) -> BucketLease | None:
        """Lease a buffer for new parameters from the device; None if they are not on the disk."""
        if host.on_disk is None:
            return None
        lease = BucketLease(self.updates, host, [host.on_disk])
        self.updates.lend(lease, self.disk.request(Way.READ, [], "a buffer for new parameters"))
        lease.wait()
        return lease

    def write(
        self,
        lease: BucketLease,
        params: Iterable[int] | None,  # the trained ones: [Note: parts of a bucket]. None: states
        what: str,  # the request's name in errors
        first: InFlight | None,  # the work that computes the new values
        before: Callable[[], None],  # waits for that work
    ) -> InFlight:
        """Write new states or parameters to the disk. Returns the work in flight; the caller starts
        its request."""
        if params is None:
            pool, spans = self.states, lease.spans()
            torn = (
                "optimizer.step(): the new states of {name!r} were not written to the disk "
                "completely ({error}); its parameters are updated and its states are torn: load a "
                "checkpoint"
            )
        else:
            pool = self.updates
            spans = list(_to_write(lease, _runs(lease.host, params), self.disk.alignment))
            torn = (
                "the new parameters of {name!r} were not written to the disk completely ({error}); "
                "they are torn: load a checkpoint"
            )

        def ready() -> None:
            before()
            lease.wait()

        def explained(error: BaseException) -> BaseException:
            if not isinstance(error, DiskError):
                return error
            raised = OptimizerError(torn.format(name=lease.host.layout.name, error=error))
            raised.__cause__ = error
            return raised

        request = self.disk.request(Way.WRITE, spans, what, ready)
        pool.write(lease, request)
        request.explained = explained
        work = first or InFlight()
        return work.then(states=request) if params is None else work.then(weights=request)


def place_of(host: HostBucket) -> DiskBuffer:
    assert host.on_disk is not None, "the bucket is in host memory"
    return host.on_disk


def _runs(host: HostBucket, params: Iterable[int]) -> Parts:
    """The byte ranges of some of a bucket's parameters, including the padding between
    neighbours."""
    places, wanted = host.layout.params, {*params, len(host.layout.params)}
    starts = [place.offset_bytes for place in places] + [len(place_of(host))]
    ends = [place.offset_bytes + place.size_bytes for place in places]
    ranges = (
        (starts[i], starts[i + 1] if i + 1 in wanted else ends[i]) for i in sorted(wanted)[:-1]
    )
    return _joined((begin, end) for begin, end in ranges if end > begin)


def _joined(parts: Iterable[tuple[int, int]]) -> Parts:
    """Merge adjacent parts; they must be sorted."""
    joined: list[tuple[int, int]] = []
    for begin, end in parts:
        if joined and begin <= joined[-1][1]:
            begin, last = joined.pop()
            end = max(end, last)
        joined.append((begin, end))
    return joined


def _to_write(lease: BucketLease, runs: Parts, unit: int) -> Iterator[FileSpan]:
    """Split the runs into whole pages and the partial pages at both ends."""
    place = place_of(lease.host)
    for begin, end in runs:
        first = min(-(-begin // unit) * unit, end)
        last = max(end // unit * unit, first)
        for part in ((begin, first), (first, last), (last, end)):
            if part[0] < part[1]:
                yield place.part(*part, lease.place)
