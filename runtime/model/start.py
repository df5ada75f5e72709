"""The machine of a model, and the placement of its parameters before the first plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megacompile import compat, notices, numa
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.rank_rates import host_of_rank
from megacompile.ir.buckets import Bucket, Unit
from megacompile.ir.plan import first_to_disk
from megacompile.options import Lowering, Options
from megacompile.runtime.checkpoint.contents import Contents
from megacompile.runtime.device.pool import HostBudget
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.replay import CudaGraphs
from megacompile.runtime.device.streams import DeviceSlots, Streams
from megacompile.runtime.disk.scratch import ScratchFile
from megacompile.runtime.disk.transfers import Disk
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params import shared_memory
from megacompile.runtime.params.fill import Filling
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.parameter_gradients import Gradients
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.updates.on_device import DeviceUpdates

Place = Callable[[StreamedParameter], tuple[Bucket, int]]


def machine_of(options: Options, place: Place) -> Machine:
    """Create the machine of a model without buckets. All ranks that share the model call this.

    Args:
        place: returns the bucket of a parameter, and its index there.
    """
    node, ranks = numa.node_of(options.device), ranks_that_share(options)
    streams = Streams(options.device)
    seed: Callable[[], int] = torch.initial_seed
    if ranks is not None:  # replicas of the same rows round alike
        first: int = ranks.all_gather_object(torch.initial_seed())[0]
        seed = functools.partial(int, first)
    return Machine(
        device=options.device,
        streams=streams,
        slots=DeviceSlots(options.device),
        buckets={},
        gradients=Gradients(streams, exact=options.lowering is Lowering.EAGER, ranks=ranks),
        place=place,
        device_update=DeviceUpdates(streams),
        graphs=CudaGraphs(options.device) if options.device.type == "cuda" else None,
        detect_anomaly=options.detect_anomaly,
        progress=options.progress,
        disk=_scratch_disk(options),
        host_budget=HostBudget(options.host_memory, node),
        update_cores=_update_cores(node, ranks),
        ranks=ranks,
        seed=seed,
    )


def ranks_that_share(options: Options) -> Ranks | None:
    """The ranks that share a running model; all of them call this."""
    mesh = options.mesh
    if not isinstance(mesh, DeviceMesh):
        return None
    ranks, world = Ranks.of(mesh, options.device), dist.group.WORLD
    notices.in_rank(
        mesh.get_rank(),
        is_first=ranks.is_first,
        is_there=lambda: dist.group.WORLD is world is not None,
    )
    return ranks


def _update_cores(node: numa.Node | None, ranks: Ranks | None) -> frozenset[int]:
    """The cores for host updates; empty: any core. All ranks call this."""
    processes = 1
    if ranks is not None and ranks.device.type == "cuda":
        number = None if node is None else node.number
        mine = (*host_of_rank(), number)
        processes = ranks.all_gather_object(mine).count(mine)
    return numa.cores_of_updates(node, torch.get_num_threads(), processes)


class ParamPlaces:
    """The bucket and index of each parameter. Pending backwards reference this instead of the
    model, so that an old loss does not keep the model alive."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[Bucket, int]] = {}  # parameter id -> place

    def note(self, buckets: Iterable[HostBucket]) -> None:
        """Record the buckets of all parameters."""
        self.of = {
            id(param): (bucket.whole, i)
            for bucket in buckets
            for i, param in enumerate(bucket.params)
        }

    def of_proxy(self, proxy: StreamedParameter) -> tuple[Bucket, int]:
        """The place of the parameter that a proxy stands for."""
        return self.of[id(proxy.param)]


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


def _scratch_disk(options: Options) -> Disk | None:
    """The scratch file for a model's states and parameters."""
    if options.disk is None:
        return None
    return Disk(ScratchFile(options.disk, limit_bytes=options.disk_memory))


def goes_to(
    units: Sequence[Unit],
    named: Mapping[str, nn.Parameter],
    options: Options,
    resident: frozenset[int],
) -> Callable[[nn.Parameter], str]:
    """The device type that each parameter will be on."""
    on_device = {
        id(named[place.name])
        for unit in units
        if unit.bucket.key in resident
        for place in unit.bucket.params
    }
    return lambda param: options.device.type if id(param) in on_device else "cpu"


def new_bucket(
    machine: Machine,
    options: Options,
    layout: Bucket,
    params: Sequence[nn.Parameter],
    resident: bool,
    *,
    stored: bool = False,
    empty: bool = False,
    filling: Filling | None = None,
) -> HostBucket:
    """Create a bucket and move its parameters into it.

    Args:
        resident: the bucket lives on the device.
        stored: its parameters live on the disk.
        empty: the parameters have no values yet.
        filling: copies the values from the device later.
    """
    pin = options.device.type == "cuda" and not resident
    return HostBucket(
        layout,
        params,
        pin=pin,
        grad_dtype=options.grad_dtype,
        pin_masters=pin and options.updates_on_device,
        resident=options.device if resident else None,
        disk=machine.disk,
        weights_on_disk=stored,
        empty=empty,
        filling=filling,
        budget=machine.host_budget,
        rank=options.rank,
    )


def fill(
    machine: Machine,
    options: Options,
    units: Sequence[Unit],
    named: Mapping[str, nn.Parameter],
    contents: Contents,
    stored: Collection[int],
) -> None:
    """Create the buckets of a model without values, none on the device.

    Args:
        named: the parameters.
        stored: keys of the buckets on the disk.
    """
    made = {}
    for unit in units:
        params = [named[place.name] for place in unit.bucket.params]
        key = unit.bucket.key
        made[key] = new_bucket(
            machine, options, unit.bucket, params, False, stored=key in stored, empty=True
        )
    contents.fill(list(made.values()), options.progress)
    machine.buckets.update(made)


def fills_later(params: Iterable[torch.Tensor], device: torch.device) -> bool:
    """True if parameters are copied to their buckets in the background.

    Host pages take time to allocate and to pin for a GPU; without a GPU the background saves
    nothing. If the values come from the GPU, the same amount must be free there: otherwise the next
    allocation (another model, for example) would fail.
    """
    if device.type != "cuda":
        return False
    on_gpu = sum(param.nbytes for param in params if param.device.type == "cuda")
    return on_gpu <= compat.free_device_bytes(device)


def buffers_to(model: nn.Module, device: torch.device, modules: Sequence[nn.Module] = ()) -> None:
    """Move a model's buffers to the device; `modules`: all of its modules, if known."""
    places = [
        (holder, name, buffer)
        for holder in compat.holders_of_buffers(modules or compat.modules_of(model))
        for name, buffer in holder.items()
        if buffer is not None and buffer.device != device
    ]
    if not places:
        return
    stray = {id(buffer): buffer for _, _, buffer in places}  # one buffer in several modules
    moved = shared_memory.moved_together(list(stray.values()), lambda b: b.to(device))
    made = dict(zip(stray, moved, strict=True))
    for holder, name, buffer in places:
        holder[name] = made[id(buffer)]


def weights_on_disk(
    units: Sequence[Unit],
    named: Mapping[str, nn.Parameter],
    options: Options,
    disk: Disk | None,
    resident: frozenset[int],
    room: HostRoom,
) -> frozenset[int]:
    """Keys of the buckets whose parameters go to the disk before the first plan: all with
    `disk_weights=True`. If plans decide, as few as possible for the rest to fit on the host; plans
    move them later.

    Args:
        named: the parameters.
        resident: keys of the buckets that live on the device.

    Raises:
        DiskError: they do not fit on the disk; none has moved.
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
        largest = max((disk.file.round_up(bucket.size_bytes) for bucket in order), default=0)
        count = room.beside(largest).fewest([(b.size_bytes, new[b.key]) for b in order])
    disk.file.check(sum(disk.file.round_up(bucket.size_bytes) for bucket in order[:count]))
    if options.disk_weights:
        every = [unit.bucket for unit in units]  # residents too, in case they leave the device
        return frozenset(bucket.key for bucket in every)
    return frozenset(bucket.key for bucket in order[:count])


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host memory in bytes that parameters may use while they move to their buckets.

    Args:
        buckets_bytes: limit for all buckets and one in flight to the disk; None: no limit.
        new_bytes: limit for parameters that are not on the host yet.
    """

    buckets_bytes: int | None = None
    new_bytes: int | None = None

    def beside(self, size_bytes: int) -> HostRoom:
        """Host memory that is left next to a bucket in flight to the disk."""
        limit = self.buckets_bytes
        return replace(self, buckets_bytes=None if limit is None else limit - size_bytes)

    def fewest(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Number of leading buckets that must go to the disk so that the rest fit both limits.

        Args:
            sizes: per bucket, its bytes and its bytes that are not on the host yet.
        """
        whole, new = sum(size for size, _ in sizes), sum(of_it for _, of_it in sizes)
        for count, (size, of_it) in enumerate(sizes):
            if not _over(whole, self.buckets_bytes) and not _over(new, self.new_bytes):
                return count
            whole, new = whole - size, new - of_it
        return len(sizes)


def _over(size: int, limit: int | None) -> bool:
    return limit is not None and size > limit
