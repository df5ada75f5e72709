"""What of a model goes to the device, and to a disk, as the options say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from megacompile.cost.optimizer import OptimizerCost
from megacompile.ir.buckets import Bucket, Unit
from megacompile.options import Options
from megacompile.runtime.device.disk_buffers import Disk
from megacompile.runtime.disk.scratch import ScratchFile


def first_that_fit(
    units: Sequence[Unit], named: Mapping[str, nn.Parameter], options: Options
) -> frozenset[int]:
    """The first buckets that fit, with gradients and states, into `options.resident` bytes."""
    assert options.resident is not None
    cost = OptimizerCost.of(options)
    chosen: list[int] = []
    left: float = options.resident
    for unit in units:
        places = enumerate(unit.bucket.params)
        trained = [i for i, place in places if named[place.name].requires_grad]
        left -= cost.resident_bytes(unit.bucket, trained)
        if left < 0:
            break
        chosen.append(unit.bucket.key)
    return frozenset(chosen)


def scratch_disk(options: Options) -> Disk | None:
    """The scratch file of a model's states and parameters."""
    if options.disk is None:
        return None
    return Disk(ScratchFile(options.disk, limit_bytes=options.disk_memory))


def check_disk(options: Options, disk: Disk | None, streamed: Iterable[Bucket]) -> None:
    """Raise where the parameters do not fit on the disk, before one of them moves.

    Raises:
        DiskError: with what is there.
    """
    if disk is not None and options.disk_weights:
        disk.file.check(sum(disk.file.round_up(bucket.size_bytes) for bucket in streamed))
