"""The rates of ranks that share a model: the slowest of each kind, the interconnect and, with
replicas, the network.

All ranks measure their own GPU and updates at the same time, because in training all copy and
update at once. Ranks of one host share its memory bandwidth and its bytes: the host has the sum of
what they reached together, and each plans with its share. One of the ranks that use a disk measures
it while the others wait.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacompile import compat
from megacompile.cost.hardware import DISK_RATES, Hardware
from megacompile.cost.rates import DiskRates, cached, load_disk, measure_together
from megacompile.option_values import torchrun_count

_BYTES = 256 * 2**20  # size of a gather: about a layer of a 7 B model
_SMALL = 64 * 2**10
_REPEATS = 5
_LONGEST = ("launch_s", "copy_s", "collective_s")

AllGather = Callable[[Any], list[Any]]  # gathers one value per rank, in the mesh's order


def ranks_of_host(mesh: DeviceMesh) -> int:
    """Number of ranks on this host according to torchrun, or else all of the mesh."""
    return torchrun_count("LOCAL_WORLD_SIZE") or mesh.size()


def host_of_rank() -> tuple[str, str]:
    """Identity of this rank's host: torchrun's group rank and the host name."""
    return os.environ.get("GROUP_RANK", ""), platform.node()


def use_cores(mesh: DeviceMesh, all_gather_object: AllGather) -> None:
    """Limit this rank's work on the host to its share of the cores: torchrun sets OMP_NUM_THREADS
    to 1, which would slow down host updates by the number of cores. This is a collective."""
    share = share_of_cores(mesh, all_gather_object, frozenset(os.sched_getaffinity(0)))
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and torch.get_num_threads() == 1
    if by_torchrun and share > 1:
        torch.set_num_threads(share)


def share_of_cores(mesh: DeviceMesh, all_gather_object: AllGather, cores: frozenset[int]) -> int:
    """This rank's number of those cores that it may use: of the other ranks of its host, it shares
    them with those that may use some of them too (`torchrun --numa-binding`). This is a
    collective."""
    host = host_of_rank()
    here = [others for where, others in all_gather_object((host, cores)) if where == host]
    sharing = sum(not cores.isdisjoint(others) for others in here)
    # of those outside of the mesh, equally many share them
    return len(cores) * len(here) // (ranks_of_host(mesh) * sharing)


@dataclass(frozen=True, slots=True)
class SharedDisk:
    """The disk of a rank's folder."""

    ranks: int  # that use it
    share_bytes: int  # of free space, per rank
    rates: DiskRates | None  # for one process alone; None: not measured


def agree_disk(
    mesh: DeviceMesh,
    folder: str | None,
    all_gather_object: AllGather,
    *,
    measured: bool,
    load: Callable[[str], DiskRates] = load_disk,
) -> SharedDisk | None:
    """The disk of this rank's folder and its users; None without a folder. This is a collective.

    The first rank of each disk measures it once, in a few seconds, if rates are needed (`measured`,
    the same in all ranks). Ranks of this host outside the mesh are assumed to use it too.

    Raises:
        DiskError: no file can be created there, or it cannot be read or written.
    """
    rank, host = mesh.get_rank(), host_of_rank()
    mine = host, None if folder is None else os.stat(folder).st_dev
    said = all_gather_object((rank, mine))
    users = [other for other, where in said if where == mine]
    beyond = ranks_of_host(mesh) - sum(where[0] == host for _, where in said)
    measures = measured and folder is not None and rank == min(users)
    found = all_gather_object((rank, load(str(folder)) if measures else None))  # the others wait
    if folder is None:
        return None
    ranks = len(users) + max(0, beyond)
    share_bytes = shutil.disk_usage(folder).free // ranks
    return SharedDisk(ranks, share_bytes, dict(found)[min(users)])


def all_gather_object(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Gather a value from each rank of a mesh, in order. This is a collective."""
    found = [value]
    for dim in reversed(range(mesh.ndim)):
        group = mesh.get_group(dim)
        each: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(each, found, group=group)
        found = [one for several in each for one in several]
    return found


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

    return _slowest_gb_s(gather, len(whole) * (count - 1) / count, device, all_gather_object)


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

    return _slowest_gb_s(add, 2 * len(part) * (count - 1) / count, device, all_gather_object)[0]


def _slowest_gb_s(
    collective: Callable[[int], None],
    received: float,
    device: torch.device,
    all_gather_object: AllGather,
) -> tuple[float, float]:
    """GB/s of a collective of `_BYTES` that receives so many bytes, and seconds of a small one, in
    the slowest rank."""

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
    return received / max(large_s - small_s, 1e-9) / 1e9, small_s


def agree(
    mesh: DeviceMesh,
    device: torch.device,
    all_gather_object: AllGather,
    disk: SharedDisk | None = None,
    *,
    saved: Callable[[torch.device, int], Hardware | None] = cached,
    measure: Callable[[torch.device, int, Callable[[], object]], Hardware] = measure_together,
    gathers: Callable[..., tuple[float, float]] = interconnect,
    sums: Callable[..., float | None] = network,
) -> Hardware:
    """Find the rates that all ranks plan with: the slowest of all GPUs and disks, with a rank's
    share of its host. This is a collective, which raises if a rank fails. Each GPU is measured
    once, in a few seconds. The keyword-only arguments are for tests."""
    host = host_of_rank()
    here = all_gather_object(host).count(host)
    rates = saved(device, here)
    if None in all_gather_object(rates):  # if one must measure, all do at once
        rates = measure(device, here, lambda: all_gather_object(None))
    assert rates is not None
    if disk is not None and disk.rates is not None:
        rates = disk.rates.on(rates).divided(disk.ranks, *DISK_RATES)
    # the host has the sum of what its ranks reached together
    reached = all_gather_object((host, rates.host_memory_gb_s))
    share_gb_s = statistics.mean(gb_s for other, gb_s in reached if other == host)
    share = rates.divided(ranks_of_host(mesh), "host_bytes").replace(host_memory_gb_s=share_gb_s)
    shares = all_gather_object(share)
    slowest = _slowest(shares)
    if len(shares) == 1:  # no other rank to gather from
        return slowest
    gather_gb_s, start_s = gathers(mesh, device, all_gather_object)
    slowest = slowest.with_interconnect(gather_gb_s)
    network_gb_s = sums(mesh, device, all_gather_object)
    return replace(slowest, collective_s=start_s, network_gb_s=network_gb_s)
