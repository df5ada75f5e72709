"""The placement of a model's parameters before the first plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from megacompile import compat
from megacompile.cost.optimizer import OptimizerCost
from megacompile.ir.buckets import Unit
from megacompile.ir.plan import first_to_disk
from megacompile.options import Options
from megacompile.runtime.disk import Disk


def first_that_fit(
    units: Sequence[Unit], named: Mapping[str, nn.Parameter], options: Options
) -> frozenset[int]:
    """The first buckets that fit, with gradients and states, into `options.resident` bytes."""
    assert options.resident is not None
    cost, left, chosen = OptimizerCost.of(options), float(options.resident), set[int]()
    for unit in units:
        places = enumerate(unit.bucket.params)
        trained = [i for i, place in places if named[place.name].requires_grad]
        left -= cost.resident_bytes(unit.bucket, trained)
        if left < 0:
            break
        chosen.add(unit.bucket.key)
    return frozenset(chosen)


def fills_later(params: Iterable[torch.Tensor], device: torch.device) -> bool:
    """True if parameters are copied to their buckets in the background: pages that are pinned for a
    GPU take time. If the values come from the GPU, as much must be free there: the next allocation
    (another model, for example) could fail otherwise."""
    if device.type != "cuda":
        return False
    on_gpu = sum(param.nbytes for param in params if param.device.type == "cuda")
    return on_gpu <= compat.free_device_bytes(device)


def weights_on_disk(
    units: Sequence[Unit],
    named: Mapping[str, nn.Parameter],
    options: Options,
    disk: Disk | None,
    resident: frozenset[int],
    new_bytes: int,
) -> frozenset[int]:
    """Keys of the buckets whose parameters go to the disk before the first plan: all with
    `disk_weights=True`. If plans decide, as few as possible for the rest to fit on the host, with
    `new_bytes` for those that are not there yet; plans move them later. Raises DiskError if they do
    not fit on the disk; none has moved."""
    if disk is None or not (options.disk_weights or options.may_store_weights):
        return frozenset()
    streamed = [unit.bucket for unit in units if unit.bucket.key not in resident]
    params = {b.key: [named[place.name] for place in b.params] for b in streamed}
    trained = {key for key, each in params.items() if any(p.requires_grad for p in each)}
    order = first_to_disk(streamed, trained)
    disk_bytes = [disk.round_up(bucket.size_bytes) for bucket in order]
    if options.disk_weights:
        disk.check(sum(disk_bytes))
        return frozenset(unit.bucket.key for unit in units)  # residents may leave the device
    new = [sum(p.nbytes for p in params[b.key] if p.device.type != "cpu") for b in order]
    # one bucket at a time is in flight to the disk
    limit_bytes = sys.maxsize if options.host_memory is None else options.host_memory
    limit_bytes -= max(disk_bytes, default=0)
    left_bytes = sum(bucket.size_bytes for bucket in order)
    count = 0
    while count < len(order) and (left_bytes > limit_bytes or sum(new[count:]) > new_bytes):
        left_bytes -= order[count].size_bytes
        count += 1
    disk.check(sum(disk_bytes[:count]))
    return frozenset(bucket.key for bucket in order[:count])
