"""Measure what a disk can do for a step: direct reads and writes of a scratch file.

A drive that is written for long may become slower (its fast cache is full, it gets warm), which a
measurement of seconds does not see.
"""

from __future__ import annotations

import functools
import mmap
import os
import time
from dataclasses import dataclass

import torch

from megacompile.cost.hardware import Hardware
from megacompile.runtime.disk.scratch import ScratchFile
from megacompile.runtime.disk.transfers import FileSpan, Request, Transfers, Way

_FILE_BYTES = 512 * 2**20  # each of two places
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Rates of one disk, GB/s."""

    read_gb_s: float  # alone
    write_gb_s: float
    read_both_gb_s: float  # while it is written too
    write_both_gb_s: float

    def on(self, hardware: Hardware) -> Hardware:
        """A machine with this disk."""
        return hardware.replace(
            disk_read_gb_s=self.read_gb_s,
            disk_write_gb_s=self.write_gb_s,
            disk_read_both_gb_s=self.read_both_gb_s,
            disk_write_both_gb_s=self.write_both_gb_s,
        )


def measure_disk(folder: str | os.PathLike[str]) -> DiskRates:
    """Measure the disk that a folder is on, in seconds; it takes 1 GiB there for as long.

    Raises:
        DiskError: no file can be made there, it has no place for it, or an I/O error.
    """
    file, transfers = ScratchFile(folder), Transfers()
    spans = {}
    for way in Way:
        place = file.take(_FILE_BYTES)
        # random: some drives and file systems compress
        memory = torch.frombuffer(mmap.mmap(-1, place.size_bytes), dtype=torch.uint8)
        words = memory.view(torch.int64)
        words.random_(generator=torch.Generator().manual_seed(0))
        spans[way] = FileSpan(place, functools.partial(torch.Tensor.view, memory, -1))
        _begun(transfers, Way.WRITE, file, spans[way]).wait()  # new places are slower

    def seconds(*ways: Way) -> dict[Way, float]:
        """Until each is done; the best of some runs, because others use the disk as well."""
        found = dict.fromkeys(ways, float("inf"))
        for _ in range(_REPEATS):
            start = time.perf_counter()
            running = [_begun(transfers, way, file, spans[way]) for way in ways]
            for way, request in zip(ways, running, strict=True):
                request.wait()
                found[way] = min(found[way], time.perf_counter() - start)
        return found

    size = _FILE_BYTES / 1e9
    alone = {way: size / seconds(way)[way] for way in Way}
    together = max(seconds(*Way).values())  # the one that ends first leaves the disk to the other
    both = size / together
    return DiskRates(
        alone[Way.READ],
        alone[Way.WRITE],
        min(alone[Way.READ], both),
        min(alone[Way.WRITE], both),
    )


def _begun(transfers: Transfers, way: Way, file: ScratchFile, span: FileSpan) -> Request:
    request = transfers.request(way, file, [span], "measure_disk()")
    request.begin()
    return request
