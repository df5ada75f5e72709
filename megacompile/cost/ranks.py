"""What ranks that share a model can do together: the slowest of each rate, and the interconnect.

Ranks of one host share its memory: its bandwidth, the cores that update, and the bytes. The first
of each host measures what there is, the others take that, and each counts on its share.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megacompile import compat
from megacompile.cost.hardware import Hardware
from megacompile.cost.rates import load

_BYTES = 256 * 2**20  # that the ranks gather together: about a layer of a 7 B model
_SMALL = 64 * 2**10
_REPEATS = 5
_LONGEST = ("launch_s", "copy_s", "collective_s")


def ranks_of_host(mesh: DeviceMesh) -> int:
    """How many ranks there are on this host, as torchrun says; else all of the mesh."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) else mesh.size()


def use_cores(mesh: DeviceMesh) -> None:
    """Let this rank's work on the host have its share of the cores.

    torchrun sets OMP_NUM_THREADS to 1 where the user has set nothing: updates on the host would
    take as many times longer as there are cores.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and torch.get_num_threads() == 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = (cores or 1) // ranks_of_host(mesh)
    if by_torchrun and share > 1:
        torch.set_num_threads(share)


def agree(mesh: DeviceMesh, device: torch.device) -> Hardware:
    """The slowest rates of all ranks: a collective of all of them."""
    first = int(os.environ.get("LOCAL_RANK", mesh.get_rank())) == 0
    mine = asdict(load(device)) if first else None
    found: list[Any] = [None] * mesh.size()
    for dim in range(mesh.ndim):  # along one dimension after the other, everybody hears of all
        group = mesh.get_group(dim)
        each: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(each, mine if dim == 0 else found, group=group)
        found = each if dim == 0 else [row for rows in each for row in rows]
    slowest = Hardware(**_slowest([row for row in found if row is not None]))
    gather_gb_s, start_s = _interconnect(mesh, device)
    shared = slowest.shared_by(ranks_of_host(mesh))
    return replace(shared, interconnect_gb_s=gather_gb_s, collective_s=start_s)


def _slowest(rates: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(Hardware):
        values = [row[field.name] for row in rates if row[field.name] is not None]
        if field.name in ("interconnect_gb_s", "collective_s"):
            continue
        if not values or isinstance(values[0], str):
            found[field.name] = values[0] if values else None
        else:
            found[field.name] = max(values) if field.name in _LONGEST else min(values)
    return found


def _interconnect(mesh: DeviceMesh, device: torch.device) -> tuple[float, float]:
    """GB/s that a rank gets from the others in a gather, and seconds that a small one takes; the
    slowest rank's."""
    group = mesh.get_group(mesh.ndim - 1)
    count = dist.get_world_size(group)
    whole = torch.empty(_BYTES // count * count, dtype=torch.uint8, device=device)

    def gather(size_bytes: int) -> float:
        place = whole[: size_bytes // count * count]
        mine = place.chunk(count)[dist.get_rank(group)]
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        compat.ALL_GATHER(place, mine, group=group)
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    small = statistics.median(gather(_SMALL) for _ in range(2 * _REPEATS))
    large = statistics.median(gather(_BYTES) for _ in range(_REPEATS))
    taken = torch.tensor([small, large], dtype=torch.float64, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=group)
    small, large = taken.tolist()
    received = _BYTES * (count - 1) / count
    return received / max(large - small, 1e-9) / 1e9, small
