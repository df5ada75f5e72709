"""The rates of ranks that share a model: the slowest of each, and the interconnect; where several
have the same rows, what they get from one another.

Each rank measures its own GPU and its own updates, all at the same time: training gets what the
links of a host give when all of its GPUs copy, and what its memory gives when all of its cores
update. Ranks of one host share its memory, its bandwidth and the bytes: the host has the sum of
what its ranks got at once, and each rank counts on its share. An update's rate is a rank's own
already: its cores are its share, and the other ranks' were busy too.

A disk that several ranks use is measured by one of them, while the others wait, as one process
would measure it. Each counts on its share of the rates and of the place.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacompile import compat
from megacompile.cost.hardware import Hardware
from megacompile.cost.probe import DiskRates
from megacompile.cost.rates import cached, cached_of_rank, load_disk, measure_of_rank

_BYTES = 256 * 2**20  # that the ranks gather together: about a layer of a 7 B model
_SMALL = 64 * 2**10
_REPEATS = 5
_LONGEST = ("launch_s", "copy_s", "collective_s")

AllGather = Callable[[Any], list[Any]]  # what each rank says, in the mesh's order


@dataclass(frozen=True, slots=True)
class Agreed:
    """The rates that all ranks plan with, and those that each of them has."""

    hardware: Hardware  # the slowest rates of all; of its host and its disk, a rank's share
    ranks: tuple[RankRates, ...]  # by number


@dataclass(frozen=True, slots=True)
class SharedDisk:
    """The disk that a rank's folder is on."""

    ranks: int  # that use it
    share_bytes: int  # of its place, for each of them
    rates: DiskRates | None  # of one process that has it alone; None: not measured


def ranks_of_host(mesh: DeviceMesh) -> int:
    """Number of ranks on this host, as torchrun says; else all of the mesh."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) else mesh.size()


def host_of_rank() -> tuple[str, str]:
    """Identity of this rank's host: the machine of torchrun's, and its name."""
    return os.environ.get("GROUP_RANK", ""), platform.node()


def use_cores(mesh: DeviceMesh) -> None:
    """Limits this rank's work on the host to its share of the cores.

    torchrun sets OMP_NUM_THREADS to 1 where the user has set nothing: updates on the host would
    take as many times longer as there are cores.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and torch.get_num_threads() == 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = (cores or 1) // ranks_of_host(mesh)
    if by_torchrun and share > 1:
        torch.set_num_threads(share)


@dataclass(frozen=True, slots=True)
class _DiskOfRank:
    """The disk of one rank's folder."""

    rank: int  # of all processes
    host: tuple[str, str]
    of_host: int  # how many ranks torchrun has there
    device: int | None  # that the folder is on; None: it has none
    free_bytes: int

    @property
    def disk(self) -> tuple[tuple[str, str], int | None]:
        """Identity of the disk: folders of many hosts may be on the same device."""
        return self.host, self.device


def agree_disks(
    mesh: DeviceMesh,
    folder: str | None,
    all_gather_object: AllGather,
    *,
    measured: bool,
    load: Callable[[str], DiskRates] = load_disk,
) -> dict[int, SharedDisk]:
    """The disks of the ranks that have one, by the rank's number: a collective of all of them.

    The first rank of each disk measures it, once, in some seconds. Ranks of this host that are not
    in the mesh are taken to use it too.

    Args:
        mesh: the ranks.
        folder: this one's, of scratch files; None: it has none.
        all_gather_object: as in `agree`.
        measured: are rates needed? The same in all ranks.
        load: gives the rates of a folder's disk.

    Raises:
        DiskError: no file can be made there, or it cannot be read or written.
    """
    device, free_bytes = None, 0
    if folder is not None:
        device, free_bytes = os.stat(folder).st_dev, shutil.disk_usage(folder).free
    rank, of_host = mesh.get_rank(), ranks_of_host(mesh)
    said: list[_DiskOfRank] = all_gather_object(
        _DiskOfRank(rank, host_of_rank(), of_host, device, free_bytes)
    )
    users: dict[tuple[tuple[str, str], int | None], list[_DiskOfRank]] = {}
    for each in sorted(said, key=lambda each: each.rank):
        if each.device is not None:
            users.setdefault(each.disk, []).append(each)
    rates: dict[int, DiskRates | None] = {}
    if measured and users:
        firsts = [those[0].rank for those in users.values()]
        mine = load(folder) if folder is not None and rank in firsts else None
        rates = dict(all_gather_object((rank, mine)))  # the others wait here
    disks = {}
    for those in users.values():
        first = those[0]
        others = first.of_host - sum(each.host == first.host for each in said)
        ranks = len(those) + max(0, others)
        share_bytes = min(each.free_bytes for each in those) // ranks
        disk = SharedDisk(ranks, share_bytes, rates.get(first.rank))
        disks.update({each.rank: disk for each in those})
    return disks


def agree(
    mesh: DeviceMesh,
    device: torch.device,
    all_gather_object: AllGather,
    disks: Mapping[int, SharedDisk] | None = None,
    *,
    probe: Probe | None = None,
) -> Agreed | None:
    """The slowest rates of all ranks: a collective of all of them.

    Each GPU is measured once, in a few seconds. On the CPU nothing is measured for a plan: None
    there, unless every rank has rates on file.

    Args:
        mesh: the ranks.
        device: where this one computes.
        all_gather_object: what each of them says; raises where one of them cannot go on.
        disks: what `agree_disks` has given.
        probe: how ranks with GPUs measure. Default: `Probe()`.
    """
    probe = probe or Probe()
    of_host, cuda = ranks_of_host(mesh), device.type == "cuda"
    here = all_gather_object(host_of_rank()).count(host_of_rank())
    mine = probe.kept(device, here) if cuda else cached(device)
    found = all_gather_object(_said(mesh, of_host, mine))
    if any(hardware is None for *_, hardware in found):  # some must measure: all do, at once
        if not cuda:
            return None
        mine = probe.measure(device, here, lambda: all_gather_object(None))
        found = all_gather_object(_said(mesh, of_host, mine))
    ranks, shares = _with_hosts(found, disks or {}, together=cuda)
    slowest = _slowest(shares)
    if not cuda or len(ranks) == 1:  # which has no rank to gather from
        return Agreed(slowest, ranks)
    gather_gb_s, start_s = probe.gathers(mesh, device, all_gather_object)
    slowest = slowest.with_interconnect(gather_gb_s)
    network_gb_s = probe.sums(mesh, device, all_gather_object)
    slowest = replace(slowest, collective_s=start_s, network_gb_s=network_gb_s)
    return Agreed(slowest, ranks)


def all_gather_object(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Gathers a value from each rank of a mesh, in their order: a collective of all of them."""
    found = [value]
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        each: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(each, found, group=group)
        found = [one for several in each for one in several]
    return found


# rank, its host, how many ranks torchrun has there, its rates
_Said = tuple[int, tuple[str, str], int, Hardware | None]


def _said(mesh: DeviceMesh, of_host: int, hardware: Hardware | None) -> _Said:
    return mesh.get_rank(), host_of_rank(), of_host, hardware


def _with_hosts(
    found: Sequence[_Said], disks: Mapping[int, SharedDisk], *, together: bool
) -> tuple[tuple[RankRates, ...], list[Hardware]]:
    """Each rank's rates, with those of its host and its disk as a whole; and with its share of
    these.

    Args:
        disks: of the ranks that have one.
        together: ranks have measured at the same time, so its host has what all of them got.
            Otherwise each has had the host alone.
    """
    rates: dict[tuple[str, str], list[float]] = {}
    for _, host, _, hardware in found:
        assert hardware is not None
        rates.setdefault(host, []).append(hardware.host_memory_gb_s)
    rows, shares = [], []
    for rank, host, of_host, hardware in sorted(found, key=lambda row: row[0]):
        assert hardware is not None
        there = rates[host]
        whole = hardware.replace(host_memory_gb_s=sum(there) if together else min(there))
        disk = disks.get(rank)
        if disk is not None and disk.rates is not None:
            whole = disk.rates.on(whole)
        rows.append(RankRates(rank, host[1], whole))
        of_memory = whole.host_memory_gb_s / len(there)
        host_bytes = None if whole.host_bytes is None else whole.host_bytes // of_host
        share = whole.disk_shared_by(1 if disk is None else disk.ranks)
        shares.append(replace(share, host_memory_gb_s=of_memory, host_bytes=host_bytes))
    return tuple(rows), shares


def _slowest(rates: Sequence[Hardware]) -> Hardware:
    found: dict[str, Any] = {}
    for field in fields(Hardware):
        values = [getattr(each, field.name) for each in rates]
        values = [value for value in values if value is not None]
        if field.name == "name":
            found["name"] = " and ".join(dict.fromkeys(values))
        else:
            worst = max if field.name in _LONGEST else min
            found[field.name] = worst(values, default=None)
    for_long = min(each.matmul_tflop_s * each.sustained for each in rates)
    found["sustained"] = for_long / found["matmul_tflop_s"]  # the two may be of two ranks
    return Hardware(**found)


def interconnect(
    mesh: DeviceMesh, device: torch.device, all_gather_object: AllGather, size_bytes: int = _BYTES
) -> tuple[float, float]:
    """GB/s that a rank gets from the others in a gather, and seconds that a small one takes; the
    slowest rank's."""
    group = mesh.get_group(mesh.ndim - 1)
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.empty(size_bytes // count * count, dtype=torch.uint8, device=device)

    def gather(size_bytes: int) -> None:
        place = whole[: size_bytes // count * count]
        compat.ALL_GATHER(place, place.chunk(count)[rank], group=group)

    small_s, large_s = _slowest_s(gather, size_bytes, device, all_gather_object)
    return _gb_s(len(whole) * (count - 1) / count, large_s - small_s), small_s


def network(
    mesh: DeviceMesh, device: torch.device, all_gather_object: AllGather, size_bytes: int = _BYTES
) -> float | None:
    """GB/s that a rank gets from those with the same rows in a sum of its part, while all ranks of
    its host do that; the slowest rank's. None: no others have these rows."""
    if mesh.ndim == 1:
        return None
    group = mesh.get_group(0)
    count = dist.get_world_size(group)
    part = torch.zeros(size_bytes // mesh.size(1), dtype=torch.uint8, device=device)

    def add(size_bytes: int) -> None:
        dist.all_reduce(part[:size_bytes], group=group)

    small_s, large_s = _slowest_s(add, size_bytes, device, all_gather_object)
    return _gb_s(2 * len(part) * (count - 1) / count, large_s - small_s)


def _slowest_s(
    collective: Callable[[int], None],
    size_bytes: int,
    device: torch.device,
    all_gather_object: AllGather,
) -> tuple[float, float]:
    """Seconds that a small one takes in the slowest rank, and one of so many bytes."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(size_bytes: int) -> float:
        wait()
        start = time.perf_counter()
        collective(size_bytes)
        wait()
        return time.perf_counter() - start

    # all have their memory then: no rank waits in a collective for one that has not
    all_gather_object(None)
    small = statistics.median(seconds(_SMALL) for _ in range(2 * _REPEATS))
    large = statistics.median(seconds(size_bytes) for _ in range(_REPEATS))
    small, large = map(max, zip(*all_gather_object((small, large)), strict=True))
    return small, large


def _gb_s(received: float, seconds: float) -> float:
    return received / max(seconds, 1e-9) / 1e9


def _measured(device: torch.device, ranks: int, meet: Callable[[], object]) -> Hardware:
    return measure_of_rank(device, ranks, meet=meet)


@dataclass(frozen=True, slots=True)
class Probe:
    """Measures what ranks with GPUs get."""

    kept: Callable[[torch.device, int], Hardware | None] = cached_of_rank
    measure: Callable[[torch.device, int, Callable[[], object]], Hardware] = _measured
    gathers: Callable[[DeviceMesh, torch.device, AllGather], tuple[float, float]] = interconnect
    sums: Callable[[DeviceMesh, torch.device, AllGather], float | None] = network


# The slow ones of several ranks, and what they are slow at.
#
#     matrix products   655 652 610 657 TFLOP/s   ->   rank 2: 610, the others 655, the fastest 657
#
# A rank is slow if it is nearer to the slowest than to the fastest. So a host whose memory is slow
# is named with all of its ranks.

FELT = 0.03  # to be behind by less is noise: a rate is measured within seconds


@dataclass(frozen=True, slots=True)
class RankRates:
    """Rates of one rank: a GPU of its own, and its host as a whole."""

    rank: int  # of all processes
    host: str
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that ranks are compared by."""

    name: str
    unit: str
    fields: tuple[str, ...]  # of `Hardware`; the first one is compared
    times: str = ""  # another field, by which it is multiplied
    scale: float = 1.0  # from a field's unit to this one
    seconds: bool = False  # more is slower

    def of(self, hardware: Hardware) -> float | None:
        """In the unit; None: not known, or none."""
        value: float | None = getattr(hardware, self.fields[0])
        if value is None:
            return None
        return value * self.scale * (getattr(hardware, self.times) if self.times else 1.0)


FIGURES = (
    Figure("matrix products", "TFLOP/s", ("matmul_tflop_s",), "sustained"),
    Figure("fp32 matrix products", "TFLOP/s", ("matmul32_tflop_s",), "sustained"),
    Figure("fp8 matrix products", "TFLOP/s", ("matmul8_tflop_s",), "sustained"),
    Figure("GPU memory", "GB/s", ("memory_gb_s",)),
    Figure("copies to the GPU", "GB/s", ("h2d_gb_s", "h2d_both_gb_s")),
    Figure("copies from the GPU", "GB/s", ("d2h_gb_s", "d2h_both_gb_s")),
    Figure("host memory", "GB/s", ("host_memory_gb_s",)),
    Figure("updates on the host", "GB/s", ("update_gb_s",)),
    Figure("reads of the disk", "GB/s", ("disk_read_gb_s", "disk_read_both_gb_s")),
    Figure("writes to the disk", "GB/s", ("disk_write_gb_s", "disk_write_both_gb_s")),
    Figure("kernel launches", "us", ("launch_s",), scale=1e6, seconds=True),
    Figure("the start of a copy", "us", ("copy_s",), scale=1e6, seconds=True),
)


@dataclass(frozen=True, slots=True)
class SlowRate:
    """A rate at which some ranks are behind the others."""

    name: str
    unit: str
    ranks: tuple[int, ...]  # the slow ones
    hosts: tuple[str, ...]  # theirs
    value: float  # of the slowest, which plans are made with
    median: float  # of the others
    fastest: float
    behind: float  # of the median: 0.07 is 7 % slower
    fields: tuple[str, ...]  # of `Hardware`

    def at_median(self, hardware: Hardware) -> Hardware:
        """The same machine with the others' rate."""
        ratio = self.median / self.value
        return hardware.replace(**{name: getattr(hardware, name) * ratio for name in self.fields})


def slow_rates(ranks: Sequence[RankRates]) -> list[SlowRate]:
    """Rates at which ranks are behind by more than `FELT`, the largest gap first."""
    found = [_slow(figure, ranks) for figure in FIGURES]
    slow = [each for each in found if each is not None and each.behind > FELT]
    return sorted(slow, key=lambda each: -each.behind)


def _slow(figure: Figure, ranks: Sequence[RankRates]) -> SlowRate | None:
    given = [(each, figure.of(each.hardware)) for each in ranks]
    values = [(each, value) for each, value in given if value and math.isfinite(value)]
    if len(values) != len(ranks) or not ranks:
        return None  # some rank has no such rate
    sign = 1 if figure.seconds else -1
    values.sort(key=lambda item: (-sign * item[1], item[0].rank))
    (_, slowest), (_, fastest) = values[0], values[-1]
    between = (slowest + fastest) / 2
    slow = [each for each, value in values if sign * value > sign * between]
    if not slow:
        return None
    median = statistics.median(value for _, value in values[len(slow) :])
    return SlowRate(
        figure.name,
        figure.unit,
        tuple(sorted(each.rank for each in slow)),
        tuple(dict.fromkeys(each.host for each in slow)),
        slowest,
        median,
        fastest,
        1 - (median / slowest if figure.seconds else slowest / median),
        figure.fields,
    )
