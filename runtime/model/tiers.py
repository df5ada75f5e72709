"""The parts of a model that go to the device, and to a disk, as the options say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from megacompile.cost.optimizer import OptimizerCost
from megacompile.ir.buckets import Unit
from megacompile.ir.schedule import first_to_disk
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


def weights_on_disk(
    units: Sequence[Unit],
    named: Mapping[str, nn.Parameter],
    options: Options,
    disk: Disk | None,
    resident: frozenset[int],
    room: HostRoom,
) -> frozenset[int]:
    """Keys of the buckets whose parameters go to the disk before there is a plan: all of them with
    `disk_weights=True`. Where plans say, as few as it takes for the others to fit on the host, and
    plans move them.

    Args:
        named: the parameters.
        resident: keys of the buckets that live on the device.

    Raises:
        DiskError: they do not fit there; none of them has moved.
    """
    streamed = [unit.bucket for unit in units if unit.bucket.key not in resident]
    if disk is None or not (options.disk_weights or options.may_store_weights):
        return frozenset()
    params = {b.key: [named[place.name] for place in b.params] for b in streamed}
    trained = {key for key, each in params.items() if any(p.requires_grad for p in each)}
    order = first_to_disk(streamed, trained)
    new = {k: sum(p.nbytes for p in each if p.device.type != "cpu") for k, each in params.items()}
    count = len(order)
    if not options.disk_weights:
        one = max((disk.file.round_up(bucket.size_bytes) for bucket in order), default=0)
        count = room.beside(one).fewest([(b.size_bytes, new[b.key]) for b in order])
    disk.file.check(sum(disk.file.round_up(bucket.size_bytes) for bucket in order[:count]))
    if options.disk_weights:
        every = [unit.bucket for unit in units]  # residents too, if they leave the device
        return frozenset(bucket.key for bucket in every)
    return frozenset(bucket.key for bucket in order[:count])


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host memory that parameters may take while they move to their buckets, bytes.

    Args:
        buckets_bytes: for all buckets, and one on its way to the disk; None: no limit.
        new_bytes: for those parameters that are not on the host yet.
    """

    buckets_bytes: int | None = None
    new_bytes: int | None = None

    def beside(self, size_bytes: int) -> HostRoom:
        """Host memory that is left next to a bucket on its way to the disk."""
        limit = self.buckets_bytes
        return replace(self, buckets_bytes=None if limit is None else limit - size_bytes)

    def fewest(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Number of the first ones that must go elsewhere, for the others to be within both.

        Args:
            sizes: of each bucket, and what of it is not on the host yet.
        """
        whole, new = sum(size for size, _ in sizes), sum(of_it for _, of_it in sizes)
        for count, (size, of_it) in enumerate(sizes):
            if not _over(whole, self.buckets_bytes) and not _over(new, self.new_bytes):
                return count
            whole, new = whole - size, new - of_it
        return len(sizes)


def _over(size: int, limit: int | None) -> bool:
    return limit is not None and size > limit
