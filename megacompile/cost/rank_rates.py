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
from typing import Any, NamedTuple

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
class RankRates:
    """Rates of one rank: its GPU, and its whole host."""

    rank: int  # of all processes
    host: str
    hardware: Hardware


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


class _Said(NamedTuple):
    """A rank's disk or rates, as it tells the others."""

    rank: int  # of all processes
    host: tuple[str, str]
    of_host: int  # number of torchrun's ranks there
    device: int | None = None  # st_dev of the folder, unique per host; None: no folder
    free_bytes: int = 0
    hardware: Hardware | None = None


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
    rank = mesh.get_rank()
    mine = _Said(rank, host_of_rank(), ranks_of_host(mesh))
    if folder is not None:
        free_bytes = shutil.disk_usage(folder).free
        mine = mine._replace(device=os.stat(folder).st_dev, free_bytes=free_bytes)
    said: list[_Said] = sorted(all_gather_object(mine), key=lambda each: each.rank)
    users: dict[tuple[tuple[str, str], int], list[_Said]] = {}
    for each in said:
        if each.device is not None:
            users.setdefault((each.host, each.device), []).append(each)
    rates: dict[int, DiskRates | None] = {}
    if measured and users:
        measures = folder is not None and any(rank == those[0].rank for those in users.values())
        found = load(folder) if folder is not None and measures else None
        rates = dict(all_gather_object((rank, found)))  # the others wait here
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
    cuda = device.type == "cuda"
    mine = _Said(mesh.get_rank(), host_of_rank(), ranks_of_host(mesh))
    here = all_gather_object(mine.host).count(mine.host)
    rates = probe.kept(device, here) if cuda else cached(device)
    found = all_gather_object(mine._replace(hardware=rates))
    if any(each.hardware is None for each in found):  # if one must measure, all do at once
        if not cuda:
            return None
        rates = probe.measure(device, here, lambda: all_gather_object(None))
        found = all_gather_object(mine._replace(hardware=rates))
    ranks, shares = _with_hosts(found, disks or {}, together=cuda)
    slowest = _slowest(shares)
    if not cuda or len(ranks) == 1:  # no other rank to gather from
        return Agreed(slowest, ranks)
    gather_gb_s, start_s = probe.gathers(mesh, device, all_gather_object)
    slowest = slowest.with_interconnect(gather_gb_s)
    network_gb_s = probe.sums(mesh, device, all_gather_object)
    return Agreed(replace(slowest, collective_s=start_s, network_gb_s=network_gb_s), ranks)


def all_gather_object(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Gather a value from each rank of a mesh, in order. This is a collective."""
    found = [value]
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        each: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(each, found, group=group)
        found = [one for several in each for one in several]
    return found


def _with_hosts(
    found: Sequence[_Said], disks: Mapping[int, SharedDisk], *, together: bool
) -> tuple[tuple[RankRates, ...], list[Hardware]]:
    """Each rank's rates with its whole host and disk, and with its share of them.

    Args:
        together: ranks measured at the same time, so the host has the sum. Otherwise each had the
            host alone.
    """
    of_hosts: dict[tuple[str, str], list[float]] = {}
    for _, host, *_, hardware in found:
        assert hardware is not None
        of_hosts.setdefault(host, []).append(hardware.host_memory_gb_s)
    rows, shares = [], []
    for rank, host, of_host, *_, hardware in sorted(found, key=lambda each: each.rank):
        assert hardware is not None
        rates = of_hosts[host]
        whole = hardware.replace(host_memory_gb_s=sum(rates) if together else min(rates))
        disk = disks.get(rank)
        if disk is not None and disk.rates is not None:
            whole = disk.rates.on(whole)
        rows.append(RankRates(rank, host[1], whole))
        host_bytes = None if whole.host_bytes is None else whole.host_bytes // of_host
        of_memory = whole.host_memory_gb_s / len(rates)
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
    mesh: DeviceMesh, device: torch.device, all_gather_object: AllGather
) -> tuple[float, float]:
    """The slowest rank's GB/s received in a gather, and seconds of a small gather."""
    group = mesh.get_group(mesh.ndim - 1)
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.empty(_BYTES // count * count, dtype=torch.uint8, device=device)

    def gather(size_bytes: int) -> None:
        place = whole[: size_bytes // count * count]
        compat.ALL_GATHER(place, place.chunk(count)[rank], group=group)

    small_s, large_s = _slowest_s(gather, device, all_gather_object)
    return _gb_s(len(whole) * (count - 1) / count, large_s - small_s), small_s


def network(mesh: DeviceMesh, device: torch.device, all_gather_object: AllGather) -> float | None:
    """The slowest rank's GB/s received in a sum over replicas, while all ranks of a host run one;
    None without replicas."""
    if mesh.ndim == 1:
        return None
    group = mesh.get_group(0)
    count = dist.get_world_size(group)
    part = torch.zeros(_BYTES // mesh.size(1), dtype=torch.uint8, device=device)

    def add(size_bytes: int) -> None:
        dist.all_reduce(part[:size_bytes], group=group)

    small_s, large_s = _slowest_s(add, device, all_gather_object)
    return _gb_s(2 * len(part) * (count - 1) / count, large_s - small_s)


def _slowest_s(
    collective: Callable[[int], None], device: torch.device, all_gather_object: AllGather
) -> tuple[float, float]:
    """Seconds of a small collective and of one with `_BYTES`, in the slowest rank."""

    def seconds(size_bytes: int, times: int) -> float:
        found = []
        for _ in range(times):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            collective(size_bytes)
            torch.cuda.synchronize(device)
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    # all ranks have allocated by now, so none waits in a collective for an allocation
    all_gather_object(None)
    mine = seconds(_SMALL, 2 * _REPEATS), seconds(_BYTES, _REPEATS)
    small_s, large_s = map(max, zip(*all_gather_object(mine), strict=True))
    return small_s, large_s


def _gb_s(received: float, seconds: float) -> float:
    return received / max(seconds, 1e-9) / 1e9


class Probe(NamedTuple):
    """The measurements of ranks with GPUs."""

    kept: Callable[[torch.device, int], Hardware | None] = cached_of_rank
    measure: Callable[[torch.device, int, Callable[[], object]], Hardware] = measure_of_rank
    gathers: Callable[[DeviceMesh, torch.device, AllGather], tuple[float, float]] = interconnect
    sums: Callable[[DeviceMesh, torch.device, AllGather], float | None] = network


# Slow ranks and their slow rates.
#
#     matrix products   655 652 610 657 TFLOP/s   ->   rank 2: 610, the others 655
#
# A rank is slow if it is closer to the slowest than to the fastest. So a host with slow memory is
# reported with all of its ranks.

FELT = 0.03  # smaller gaps are noise: a rate is measured within seconds

_FIGURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # name, unit, fields of `Hardware`, of which the first is compared
    ("matrix products", "TFLOP/s", ("matmul_tflop_s",)),
    ("fp32 matrix products", "TFLOP/s", ("matmul32_tflop_s",)),
    ("fp8 matrix products", "TFLOP/s", ("matmul8_tflop_s",)),
    ("GPU memory", "GB/s", ("memory_gb_s",)),
    ("copies to the GPU", "GB/s", ("h2d_gb_s", "h2d_both_gb_s")),
    ("copies from the GPU", "GB/s", ("d2h_gb_s", "d2h_both_gb_s")),
    ("host memory", "GB/s", ("host_memory_gb_s",)),
    ("updates on the host", "GB/s", ("update_gb_s",)),
    ("reads of the disk", "GB/s", ("disk_read_gb_s", "disk_read_both_gb_s")),
    ("writes to the disk", "GB/s", ("disk_write_gb_s", "disk_write_both_gb_s")),
    ("kernel launches", "us", ("launch_s",)),
    ("the start of a copy", "us", ("copy_s",)),
)


@dataclass(frozen=True, slots=True)
class SlowRate:
    """A rate at which some ranks are slower than the others."""

    name: str
    unit: str  # TFLOP/s, GB/s or, where more is slower, us
    ranks: tuple[int, ...]  # the slow ones
    hosts: tuple[str, ...]  # of the slow ranks
    value: float  # of the slowest rank, used by plans
    median: float  # of the others
    fields: tuple[str, ...]  # of `Hardware`

    def at_median(self, hardware: Hardware) -> Hardware:
        """The same machine with the others' rate."""
        ratio = self.median / self.value
        return hardware.replace(**{name: getattr(hardware, name) * ratio for name in self.fields})


def slow_rates(ranks: Sequence[RankRates]) -> list[SlowRate]:
    """Rates at which ranks are slower by more than `FELT`."""
    found = []
    for name, unit, of in _FIGURES:
        values = [getattr(each.hardware, of[0]) for each in ranks]
        if not values or not all(value and math.isfinite(value) for value in values):
            continue  # a rank has no such rate
        if unit == "us":
            values = [1e6 * value for value in values]
        elif unit == "TFLOP/s":
            values = [v * r.hardware.sustained for v, r in zip(values, ranks, strict=True)]
        sign = 1 if unit == "us" else -1
        between = sign * (min(values) + max(values)) / 2
        slow = [r for v, r in zip(values, ranks, strict=True) if sign * v > between]
        median = statistics.median(v for v in values if sign * v <= between)
        worst = max(values, key=lambda value: sign * value)
        if slow and 1 - min(worst, median) / max(worst, median) > FELT:
            numbers = tuple(sorted(each.rank for each in slow))
            hosts = tuple(dict.fromkeys(each.host for each in slow))
            found.append(SlowRate(name, unit, numbers, hosts, worst, median, of))
    return found
