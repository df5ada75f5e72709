"""Parameters that are on a disk, while they are in host memory.

Buffers of page-locked memory are lent, each to one use of one bucket. There are two kinds, with
threads of their own, because each is given back by something else:

    for a prefetch    filled from the disk; free after the copy to the device
    for an update     the host changes what was read into it, or the device leaves new parameters
                      there; free when they are written

[Note: parts of a bucket] An update writes what it has changed, and no other byte: frozen parameters
may be in the same page. Whole pages are written by direct I/O. What is less than a page, at the
begin and the end of a run of trained parameters, goes through the page cache, as what a user writes
through the mapping does. See [Note: coherence] in `runtime/disk/scratch.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megacompile.errors import DiskError
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part
from megacompile.runtime.device.disk_buffers import Disk
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.device.streams import Handle, Host
from megacompile.runtime.disk.transfers import FileSpan, Way
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.pending import InFlight
from megacompile.runtime.updates.loans import Loan, Loans, Parts, place_of
from megacompile.runtime.updates.staging import UpdatedParams, Writing


@dataclass(frozen=True, slots=True)
class WrittenWeights(Writing):
    """New parameters on their way to a disk: an `InFlight`."""

    def event(self, part: Part) -> torch.cuda.Event | None:
        """That of the copies of states to the host; parameters are there when they are written."""
        return None if self.first is None or part is Part.WEIGHTS else self.first.event(part)

    def ahead(self, part: Part) -> Host:
        """States that are in host memory are there when they are made."""
        return UpdatedParams(self.first) if part is Part.STATES else UpdatedParams(self)

    def _torn(self, error: DiskError) -> str:
        return (
            f"the new parameters of {self.name!r} did not reach the disk whole ({error}); they "
            "are torn: load a checkpoint"
        )


class WeightStaging:
    """The buffers of one model's parameters.

    Args:
        disk: where parameters are.
        device: that copies to and from the buffers.
        budget: makes them.
    """

    def __init__(self, disk: Disk, device: torch.device, budget: HostBudget) -> None:
        self.disk = disk
        self.read_bytes = self.written_bytes = 0  # so far
        self.prefetches = Loans(device, "megacompile-weights", budget)
        self.updates = Loans(device, "megacompile-new-weights", budget)
        self._updated: dict[int, Loan] = {}  # by their ids: a write of the last may be ending

    def of(self, host: HostBucket) -> Loan | None:
        """The values that an update of a bucket works on."""
        loans = reversed(list(self._updated.values()))
        return next((loan for loan in loans if loan.host is host and not loan.over), None)

    def read(self, host: HostBucket, behind: Sequence[Handle], what: str) -> Loan | None:
        """Bring a bucket to memory for a prefetch; None: it is in memory, or a child's own."""
        if not _is_ours(host):
            return None
        return self._read(self.prefetches, host, [(0, len(place_of(host)))], behind, what)

    def read_trained(
        self, host: HostBucket, params: Sequence[int], behind: Sequence[Handle], what: str
    ) -> Loan | None:
        """The same of some of its parameters, for an update by the host."""
        if not _is_ours(host):
            return None
        unit = self.disk.file.alignment
        whole = _joined(
            (begin // unit * unit, -(-end // unit) * unit) for begin, end in _runs(host, params)
        )
        loan = self._read(self.updates, host, whole, behind, what)
        self._updated[id(loan)] = loan
        return loan

    def _read(
        self, loans: Loans, host: HostBucket, parts: Parts, behind: Sequence[Handle], what: str
    ) -> Loan:
        writes = [h for h in behind if not isinstance(h.value, Loan)]  # what is lent is in order
        waits = [h.host for h in writes if h.host is not None]
        loan = Loan(host, waits, (), tells=loans is self.prefetches)
        spans = [place_of(host).part(begin, end, loan.flat) for begin, end in parts]
        loan.read = self.disk.request(Way.READ, spans, what, before=lambda: None)
        self.read_bytes += loan.read.size_bytes
        loans.lend(loan)
        return loan

    def take(self, host: HostBucket, params: Iterable[int]) -> Loan | None:
        """A buffer for new parameters that the device has made; None as for `read`."""
        if not _is_ours(host):
            return None
        gaps = list(_gaps(host.layout, _runs(host, params), set(params)))
        loan = Loan(host, (), gaps, tells=False)
        self._updated[id(loan)] = loan
        self.updates.lend(loan)
        loan.settle()
        return loan

    def write(
        self,
        loan: Loan,
        params: Iterable[int],
        what: str,
        first: InFlight | None,
        before: Callable[[], None],
    ) -> WrittenWeights:
        """Bring new parameters to the disk: what is in flight then, whose request is to begin.

        Args:
            params: those that are new; see [Note: parts of a bucket].
            first: what makes them.
            before: waits for that.
        """

        def made() -> None:
            before()
            loan.settle()

        spans = list(_to_write(loan, _runs(loan.host, params), self.disk.file.alignment))
        request = loan.write = self.disk.request(Way.WRITE, spans, what, before=made)
        self.written_bytes += request.size_bytes
        request.when_done(functools.partial(self._written, loan))
        fresh = {} if first is None else first.fresh
        return WrittenWeights(request, loan.host.layout.name, first, fresh)

    def _written(self, loan: Loan) -> None:
        self._updated.pop(id(loan), None)
        self.updates.give_back(loan)

    def give_up(self) -> None:
        """A run has failed."""
        self.prefetches.give_up()
        self.updates.give_up()
        for loan in list(self._updated.values()):
            if loan.over:
                self._updated.pop(id(loan), None)


def _is_ours(host: HostBucket) -> bool:
    """Is it on the disk, for this process? A child of a fork has it in its memory."""
    return host.on_disk is not None and host.on_disk.ours


def _runs(host: HostBucket, params: Iterable[int]) -> Parts:
    """The bytes of some parameters of a bucket; of neighbours, with what is between them."""
    places, wanted = host.layout.params, set(params)
    found = []
    for i in sorted(wanted):
        place = places[i]
        end = place.offset_bytes + place.size_bytes
        if i + 1 in wanted:
            end = places[i + 1].offset_bytes
        elif i + 1 == len(places):
            end = len(place_of(host))  # nothing is after it
        if end > place.offset_bytes:
            found.append((place.offset_bytes, end))
    return _joined(found)


def _joined(parts: Iterable[tuple[int, int]]) -> Parts:
    """Parts in order, those that touch one another as one."""
    found: list[tuple[int, int]] = []
    for begin, end in parts:
        if found and begin <= found[-1][1]:
            begin, last = found.pop()
            end = max(end, last)
        found.append((begin, end))
    return found


def _gaps(layout: Bucket, runs: Parts, params: set[int]) -> Iterator[tuple[int, int]]:
    """The values of the runs that are no parameter."""
    for begin, end in runs:
        at = begin
        for i in sorted(params):
            place = layout.params[i]
            if begin <= place.offset_bytes < end and place.size_bytes:
                if at < place.offset_bytes:
                    yield at, place.offset_bytes
                at = place.offset_bytes + place.size_bytes
        if at < end:
            yield at, end


def _to_write(loan: Loan, runs: Parts, unit: int) -> Iterator[FileSpan]:
    """The whole pages of the runs, and what is left at both ends of each."""
    place = place_of(loan.host)
    for begin, end in runs:
        first, last = -(-begin // unit) * unit, end // unit * unit
        if first >= last:
            yield place.part(begin, end, loan.flat)
            continue
        for part in ((begin, first), (first, last), (last, end)):
            if part[0] < part[1]:
                yield place.part(*part, loan.flat)
