"""The rates of ranks that share a model: the slowest of each kind, the interconnect and, with
replicas, the network.

All ranks measure their own GPU and updates at the same time, because in training all GPUs of a host
copy at once and all cores update at once. Ranks of one host share its memory bandwidth and its
bytes: the host has the sum of what its ranks reached together, and each rank plans with its share.
An update's rate needs no division, because each rank measured it on its share of the cores while
the others were busy.

A disk that several ranks use is measured by one of them while the others wait. Each plans with its
share of the rates and of the space.
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

from megacompile import compat, numa
from megacompile.cost.hardware import Hardware
from megacompile.cost.probe import DiskRates
from megacompile.cost.rates import cached, cached_of_rank, load_disk, measure_of_rank

_BYTES = 256 * 2**20  # size of a gather: about a layer of a 7 B model
_SMALL = 64 * 2**10
_REPEATS = 5
_LONGEST = ("launch_s", "copy_s", "collective_s")

AllGather = Callable[[Any], list[Any]]  # gathers one value per rank, in the mesh's order


@dataclass(frozen=True, slots=True)
class Agreed:
    """The rates that all ranks plan with, and each rank's own rates."""

    hardware: Hardware  # the slowest of all ranks; a rank's share of its host and disk
    ranks: tuple[RankRates, ...]  # in order of rank


@dataclass(frozen=True, slots=True)
class SharedDisk:
    """The disk of a rank's folder."""

    ranks: int  # that use the disk
    share_bytes: int  # of free space, per rank
    rates: DiskRates | None  # for one process alone; None: not measured


def ranks_of_host(mesh: DeviceMesh) -> int:
    """Number of ranks on this host according to torchrun, or else all of the mesh."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) else mesh.size()


def host_of_rank() -> tuple[str, str]:
    """Identity of this rank's host: torchrun's group rank and the host name."""
    return os.environ.get("GROUP_RANK", ""), platform.node()


def use_cores(mesh: DeviceMesh) -> None:
    """Limit this rank's work on the host to its share of the cores.

    torchrun sets OMP_NUM_THREADS to 1 by default, which would slow down host updates by the number
    of cores.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and torch.get_num_threads() == 1
    share = numa.usable_cores() // ranks_of_host(mesh)
    if by_torchrun and share > 1:
        torch.set_num_threads(share)


@dataclass(frozen=True, slots=True)
class _DiskOfRank:
    """The disk of one rank's folder."""

    rank: int  # of all processes
    host: tuple[str, str]
    of_host: int  # number of torchrun's ranks there
    device: int | None  # st_dev of the folder; None: no folder
    free_bytes: int

    @property
    def disk(self) -> tuple[tuple[str, str], int | None]:
        """Identity of the disk; device numbers are only unique per host."""
        return self.host, self.device


def agree_disks(
    mesh: DeviceMesh,
    folder: str | None,
    all_gather_object: AllGather,
    *,
    measured: bool,
    load: Callable[[str], DiskRates] = load_disk,
) -> dict[int, SharedDisk]:
    """Find the disks of the ranks that have one, by rank. This is a collective.

    The first rank of each disk measures it once, in a few seconds. Ranks of this host outside the
    mesh are assumed to use it too.

    Args:
        mesh: the ranks.
        folder: this rank's folder of scratch files, if any.
        all_gather_object: as in `agree`.
        measured: rates are needed. The same in all ranks.
        load: returns the rates of a folder's disk.

    Raises:
        DiskError: no file can be created there, or it cannot be read or written.
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
    """Find the slowest rates of all ranks. This is a collective.

    Each GPU is measured once, in a few seconds. On the CPU nothing is measured; the result is None
    unless every rank has cached rates.

    Args:
        mesh: the ranks.
        device: of this rank.
        all_gather_object: gathers a value from each rank; raises if one of them failed.
        disks: from `agree_disks`.
        probe: measures ranks with GPUs. Default: `Probe()`.
    """
    probe = probe or Probe()
    of_host, cuda = ranks_of_host(mesh), device.type == "cuda"
    here = all_gather_object(host_of_rank()).count(host_of_rank())
    mine = probe.kept(device, here) if cuda else cached(device)
    found = all_gather_object(_said(mesh, of_host, mine))
    if any(hardware is None for *_, hardware in found):  # if one must measure, all do at once
        if not cuda:
            return None
        mine = probe.measure(device, here, lambda: all_gather_object(None))
        found = all_gather_object(_said(mesh, of_host, mine))
    ranks, shares = _with_hosts(found, disks or {}, together=cuda)
    slowest = _slowest(shares)
    if not cuda or len(ranks) == 1:  # no other rank to gather from
        return Agreed(slowest, ranks)
    gather_gb_s, start_s = probe.gathers(mesh, device, all_gather_object)
    slowest = slowest.with_interconnect(gather_gb_s)
    network_gb_s = probe.sums(mesh, device, all_gather_object)
    slowest = replace(slowest, collective_s=start_s, network_gb_s=network_gb_s)
    return Agreed(slowest, ranks)


def all_gather_object(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Gather a value from each rank of a mesh, in order. This is a collective."""
    found = [value]
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        each: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(each, found, group=group)
        found = [one for several in each for one in several]
    return found


# rank, its host, number of torchrun's ranks there, its rates
_Said = tuple[int, tuple[str, str], int, Hardware | None]


def _said(mesh: DeviceMesh, of_host: int, hardware: Hardware | None) -> _Said:
    return mesh.get_rank(), host_of_rank(), of_host, hardware


def _with_hosts(
    found: Sequence[_Said], disks: Mapping[int, SharedDisk], *, together: bool
) -> tuple[tuple[RankRates, ...], list[Hardware]]:
    """Each rank's rates with its whole host and disk, and with its share of them.

    Args:
        disks: of the ranks that have one.
        together: ranks measured at the same time, so the host has the sum. Otherwise each had the
            host alone.
    """
    rates: dict[tuple[str, str], list[float]] = {}
    for _, host, _, hardware in found:
        assert hardware is not None
        rates.setdefault(host, []).append(hardware.host_memory_gb_s)
    rows, shares = [], []
    for rank, host, of_host, hardware in sorted(found, key=lambda row: row[0]):
        assert hardware is not None
        of_host_gb_s = rates[host]
        whole = hardware.replace(
            host_memory_gb_s=sum(of_host_gb_s) if together else min(of_host_gb_s)
        )
        disk = disks.get(rank)
        if disk is not None and disk.rates is not None:
            whole = disk.rates.on(whole)
        rows.append(RankRates(rank, host[1], whole))
        of_memory = whole.host_memory_gb_s / len(of_host_gb_s)
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
    found["sustained"] = for_long / found["matmul_tflop_s"]  # the two may come from different ranks
    return Hardware(**found)


def interconnect(
    mesh: DeviceMesh, device: torch.device, all_gather_object: AllGather, size_bytes: int = _BYTES
) -> tuple[float, float]:
    """The slowest rank's GB/s received in a gather, and seconds of a small gather."""
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
    """The slowest rank's GB/s received in a sum over replicas, while all ranks of a host run one;
    None without replicas."""
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
    """Seconds of a small collective and of one with `size_bytes`, in the slowest rank."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def seconds(size_bytes: int) -> float:
        wait()
        start = time.perf_counter()
        collective(size_bytes)
        wait()
        return time.perf_counter() - start

    # all ranks have allocated by now, so none waits in a collective for an allocation
    all_gather_object(None)
    small = statistics.median(seconds(_SMALL) for _ in range(2 * _REPEATS))
    large = statistics.median(seconds(size_bytes) for _ in range(_REPEATS))
    small, large = map(max, zip(*all_gather_object((small, large)), strict=True))
    return small, large


def _gb_s(received: float, seconds: float) -> float:
    return received / max(seconds, 1e-9) / 1e9


@dataclass(frozen=True, slots=True)
class Probe:
    """The measurements of ranks with GPUs."""

    kept: Callable[[torch.device, int], Hardware | None] = cached_of_rank
    measure: Callable[[torch.device, int, Callable[[], object]], Hardware] = measure_of_rank
    gathers: Callable[[DeviceMesh, torch.device, AllGather], tuple[float, float]] = interconnect
    sums: Callable[[DeviceMesh, torch.device, AllGather], float | None] = network


# Slow ranks and their slow rates.
#
#     matrix products   655 652 610 657 TFLOP/s   ->   rank 2: 610, the others 655, the fastest 657
#
# A rank is slow if it is closer to the slowest than to the fastest. So a host with slow memory is
# reported with all of its ranks.

FELT = 0.03  # smaller gaps are noise: a rate is measured within seconds


@dataclass(frozen=True, slots=True)
class RankRates:
    """Rates of one rank: its GPU, and its whole host."""

    rank: int  # of all processes
    host: str
    hardware: Hardware


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate by which ranks are compared."""

    name: str
    unit: str
    fields: tuple[str, ...]  # of `Hardware`; the first is compared
    times: str = ""  # another field, a factor
    scale: float = 1.0  # from a field's unit to this one
    seconds: bool = False  # larger is slower

    def of(self, hardware: Hardware) -> float | None:
        """The figure in its unit; None if unknown."""
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
    """A rate at which some ranks are slower than the others."""

    name: str
    unit: str
    ranks: tuple[int, ...]  # the slow ones
    hosts: tuple[str, ...]  # of the slow ranks
    value: float  # of the slowest rank, used by plans
    median: float  # of the others
    fastest: float
    behind: float  # relative to the median: 0.07 is 7 % slower
    fields: tuple[str, ...]  # of `Hardware`

    def at_median(self, hardware: Hardware) -> Hardware:
        """The same machine with the others' rate."""
        ratio = self.median / self.value
        return hardware.replace(**{name: getattr(hardware, name) * ratio for name in self.fields})


def slow_rates(ranks: Sequence[RankRates]) -> list[SlowRate]:
    """Rates at which ranks are slower by more than `FELT`, the largest gap first."""
    found = [_slow(figure, ranks) for figure in FIGURES]
    slow = [each for each in found if each is not None and each.behind > FELT]
    return sorted(slow, key=lambda each: -each.behind)


def _slow(figure: Figure, ranks: Sequence[RankRates]) -> SlowRate | None:
    given = [(each, figure.of(each.hardware)) for each in ranks]
    values = [(each, value) for each, value in given if value and math.isfinite(value)]
    if len(values) != len(ranks) or not ranks:
        return None  # a rank has no such rate
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
