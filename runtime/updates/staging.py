"""Host staging buffers for optimizer states and parameters on a disk.

Page-locked buffers are leased (see `leases`), each for one use of one bucket, from its read to the
completion of its write or of its copy to the device. There are three kinds with separate threads,
because different events free them:

    states            a step reads states from the disk, updates and writes them; free after that
    for a prefetch    parameters from the disk; free after the copy to the device
    for an update     the host updates parameters from the disk, or the device copies new ones
                      here; free after the write to the disk

[Note: parts of a bucket] An update writes only the bytes that it has changed: frozen parameters may
share a page. Whole pages are written by direct I/O. Partial pages at both ends of a run of trained
parameters go through the page cache, like a user's writes through the mapping.
See [Note: coherence] in `runtime/disk/scratch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from megacompile.errors import DiskError, OptimizerError
from megacompile.ir.plan import Plan
from megacompile.runtime.device.buffers import DiskBuffer
from megacompile.runtime.device.pool import HostBudget, Lease
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.disk.transfers import Disk, FileSpan, Request, Way
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates.leases import BucketBuffers, BucketLease

Parts = Sequence[tuple[int, int]]  # bytes of a bucket: from, to


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
        places = [host.on_disk for host in hosts]
        size = max((len(place) for place in places if place is not None), default=0)
        self.states.require(plan.state_sets, max(self.states.size_bytes, plan.state_set_bytes))
        self.prefetches.require(plan.weight_sets, size)
        self.updates.require(plan.new_weight_sets, size)

    def reserve(self, hosts: Iterable[HostBucket]) -> None:
        """Allocate the memory for an update of these buckets before it changes anything. Plans that
        were made before the optimizer was known may have reserved too little.

        Raises:
            HostMemoryError: too little host memory; nothing has changed.
        """
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
        """Read a bucket's states into memory; None if none are on the disk.

        In a child of a fork they are in private memory already.
        """
        buffers = host.states.on_disk()
        if not buffers or not all(buffer.ours for buffer in buffers):
            return None
        lease = BucketLease(self.states, host, buffers)
        self.states.lend(lease, self.disk.request(Way.READ, lease.spans(), what))
        return lease

    def read(
        self, host: HostBucket, params: Iterable[int] | None, after: Sequence[Handle], what: str
    ) -> BucketLease | None:
        """Read a bucket into memory; None if it is in memory already.

        Args:
            params: of a host update; None: all, for a prefetch.
            after: the handles that the read waits for.
            what: names the request in errors.
        """
        if not _is_ours(host):
            return None
        place, unit = place_of(host), self.disk.file.alignment
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
        pool.lend(lease, self.disk.request(Way.READ, spans, what))
        return lease

    def take(self, host: HostBucket) -> BucketLease | None:
        """Lease a buffer for new parameters from the device; None as for `read`."""
        if not _is_ours(host):
            return None
        lease = BucketLease(self.updates, host, [place_of(host)])
        self.updates.lend(lease)
        lease.wait()
        return lease

    def write_states(
        self, lease: BucketLease, what: str, first: InFlight | None, before: Callable[[], None]
    ) -> InFlight:
        """Write new states to the disk.

        Args:
            lease: the states in memory.
            what: names the request in errors.
            first: the work that computes the states.
            before: waits for that work.

        Returns:
            The work in flight; the caller starts its request.
        """
        torn = (
            "optimizer.step(): the new states of {name!r} were not written to the disk completely "
            "({error}); its parameters are updated and its states are torn: load a checkpoint"
        )
        request = self._write(self.states, lease, lease.spans(), what, before, torn)
        return (first or InFlight()).then(states=request)

    def write(
        self,
        lease: BucketLease,
        params: Iterable[int],
        what: str,
        first: InFlight | None,
        before: Callable[[], None],
    ) -> InFlight:
        """Write new parameters to the disk, like `write_states`.

        Args:
            params: the trained ones; see [Note: parts of a bucket].
        """
        spans = list(_to_write(lease, _runs(lease.host, params), self.disk.file.alignment))
        torn = (
            "the new parameters of {name!r} were not written to the disk completely ({error}); "
            "they are torn: load a checkpoint"
        )
        request = self._write(self.updates, lease, spans, what, before, torn)
        return (first or InFlight()).then(weights=request)

    def _write(
        self,
        pool: BucketBuffers,
        lease: BucketLease,
        spans: Sequence[FileSpan],
        what: str,
        before: Callable[[], None],
        torn: str,
    ) -> Request:
        def ready() -> None:
            before()
            lease.wait()

        def explained(error: BaseException) -> BaseException:
            if not isinstance(error, DiskError):
                return error
            raised = OptimizerError(torn.format(name=name, error=error))
            raised.__cause__ = error
            return raised

        name = lease.host.layout.name
        request = self.disk.request(Way.WRITE, spans, what, ready)
        pool.write(lease, request)
        request.explained = explained
        return request


def place_of(host: HostBucket) -> DiskBuffer:
    """The disk buffer of a bucket's parameters."""
    assert host.on_disk is not None, "the bucket is in host memory"
    return host.on_disk


def _is_ours(host: HostBucket) -> bool:
    """True if this process has the bucket on the disk; a child of a fork has it in memory."""
    return host.on_disk is not None and host.on_disk.ours


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
        first, last = -(-begin // unit) * unit, end // unit * unit
        if first >= last:
            yield place.part(begin, end, lease.place)
            continue
        for part in ((begin, first), (first, last), (last, end)):
            if part[0] < part[1]:
                yield place.part(*part, lease.place)
