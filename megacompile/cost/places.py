"""Bytes that buckets and saved tensors take where they are: on the host and on a disk.

On the host the tensors of a part are in one buffer (`megacompile.ir.buckets`). On a disk buffers
begin and end at pages, and so do the buffers of host memory that they come to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from megacompile.cost.memory import MemoryKind, MemoryMoment, accumulated
from megacompile.cost.optimizer import EIGHT_BITS, OptimizerCost
from megacompile.ir import ops
from megacompile.ir.buckets import ALIGNMENT_BYTES, Bucket, largest_shard, mirrored
from megacompile.ir.ops import Value
from megacompile.ir.ops.op import value_bytes
from megacompile.ir.schedule import Schedule
from megacompile.runtime.optim.blockwise import absmax_numel, quantizes

_PAGE = 4096  # places in a scratch file begin and end at pages
_FLOAT32 = 4.0  # bytes, of the states of small parameters, which are never in 8 bits


def flat_bytes(bucket: Bucket, indices: Iterable[int], item_of: Callable[[int], float]) -> int:
    """Bytes of a buffer with a tensor like each of some parameters.

    Args:
        item_of: the bytes of an element, by those of the parameter's as it is streamed.
    """
    items = {i: math.ceil(item_of(bucket.params[i].dtype.itemsize)) for i in indices}
    return mirrored(bucket, items)[1]


def state_bytes(bucket: Bucket, trained: Iterable[int], cost: OptimizerCost) -> list[int]:
    """Bytes of the buffers of each optimizer state that every parameter has; of a rank.

    Args:
        bucket: what ranks have together.
        trained: indices of the parameters that get a gradient.
    """
    if not cost.states or not (indices := list(trained)):
        return []
    mine = largest_shard(bucket)
    if cost.state_bytes != EIGHT_BITS:
        return [flat_bytes(mine, indices, lambda item: cost.states_of(item) / cost.states)]
    small = [i for i in indices if not quantizes(bucket.params[i].numel)]
    codes = 0
    for i in sorted(set(indices) - set(small)):
        codes += _codes_bytes(mine.params[i].numel)
    found = [codes, flat_bytes(mine, small, lambda item: _FLOAT32)]
    return [size for size in found if size]


def stored_bytes(bucket: Bucket, trained: Iterable[int], cost: OptimizerCost) -> int:
    """Bytes that a rank's states of a bucket take on a disk, where each parameter's has a place.

    The set of buffers that they come to in host memory is as large.

    Args:
        bucket: what ranks have together.
        trained: indices of the parameters that get a gradient.
    """
    size, mine = 0, largest_shard(bucket)
    for i in trained if cost.states else ():
        param = mine.params[i]
        if cost.state_bytes != EIGHT_BITS:
            each = math.ceil(param.numel * cost.states_of(param.dtype.itemsize) / cost.states)
        elif quantizes(bucket.params[i].numel):
            each = _codes_bytes(param.numel)
        else:
            each = math.ceil(param.numel * _FLOAT32)
        size += cost.states * whole_pages(each)
    return size


def stored_weights_bytes(bucket: Bucket) -> int:
    """Bytes that the parameters of a bucket take there, which have one place together."""
    return whole_pages(bucket.size_bytes)


def whole_pages(size_bytes: int) -> int:
    """Bytes of the place on a disk that so many take."""
    return _rounded(size_bytes, _PAGE)


def _codes_bytes(numel: int) -> int:
    """Bytes of the codes and largest magnitudes of a parameter."""
    return _rounded(numel, ALIGNMENT_BYTES) + _rounded(4 * absmax_numel(numel), ALIGNMENT_BYTES)


def _rounded(size: float, unit: int) -> int:
    return -(-math.ceil(size) // unit) * unit


def host_memory(
    schedules: Schedule | Iterable[Schedule],
    optimizer: OptimizerCost | None = None,
    *,
    for_step: bool = False,
) -> dict[MemoryKind, int]:
    """Bytes in host memory by kind, once training runs: gradients and states are made by then, and
    at the boundary of forward and backward saved tensors wait there.

    Args:
        for_step: the schedules were made for `optimizer.step()`, whatever the optimizer here: the
            gradients that a backward leaves are for that. Those that it adds to wait in any case.
    """
    each = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    buckets = {b.key: b for schedule in each for b in schedule.buckets}
    trained: dict[int, set[int]] = {}
    for schedule in each:
        if schedule.backward is not None:
            for key, params in schedule.gradient_params.items():
                trained.setdefault(key, set()).update(params)
    kinds = (MemoryKind.PARAMETERS, MemoryKind.MASTERS, MemoryKind.GRADIENTS, MemoryKind.STATES)
    found = dict.fromkeys(kinds, 0)
    cost = optimizer or OptimizerCost(states=0)
    resident = {key for schedule in each for key in schedule.plan.resident}
    on_disk = {key for schedule in each for key in schedule.plan.on_disk}
    read = {key for schedule in each for key in schedule.plan.weights_on_disk}
    added_to = {b.key for one in each for b in accumulated(one, reads=for_step)}
    staged = weights = 0  # of the largest bucket on a disk
    for key, bucket in buckets.items():
        if key in resident:
            continue
        sizes = streamed_bytes(bucket, trained.get(key, ()), cost, accumulates=key in added_to)
        if key in on_disk:
            sizes.pop(MemoryKind.STATES)
            staged = max(staged, stored_bytes(bucket, trained.get(key, ()), cost))
        if key in read:
            sizes.pop(MemoryKind.PARAMETERS)
            weights = max(weights, stored_weights_bytes(bucket))
        for kind, size in sizes.items():
            found[kind] += size
    plans = [schedule.plan for schedule in each]
    found[MemoryKind.STAGED] = staged * max((plan.state_sets for plan in plans), default=0)
    sets = (plan.weight_sets + plan.new_weight_sets for plan in plans)
    found[MemoryKind.STAGED] += weights * max(sets, default=0)
    found[MemoryKind.STAGED] += max(map(_passing_bytes, each), default=0)
    found[MemoryKind.ACTIVATIONS] = sum(size for one in each for size in _waiting_bytes(one))
    return {kind: size for kind, size in found.items() if size}


def streamed_bytes(
    bucket: Bucket, trained: Iterable[int], cost: OptimizerCost, *, accumulates: bool = False
) -> dict[MemoryKind, int]:
    """Host memory of a bucket that is streamed, by kind.

    Args:
        trained: indices of the parameters that get a gradient.
        accumulates: gradients of micro-batches wait for an update in a later backward.
    """
    mine = largest_shard(bucket)
    found = {MemoryKind.PARAMETERS: mine.size_bytes}
    masters = cost.master_bytes
    if masters is not None:
        found[MemoryKind.MASTERS] = flat_bytes(mine, range(len(mine.params)), lambda _: masters)
    indices = list(trained)
    found[MemoryKind.STATES] = cost.states * sum(state_bytes(bucket, indices, cost))
    grad_of = cost.grad_of if accumulates else cost.kept_grad_of
    found[MemoryKind.GRADIENTS] = flat_bytes(mine, indices, grad_of)
    return found


def saved_elsewhere(schedule: Schedule) -> list[tuple[int, int]]:
    """The saved tensors that wait on the host or on a disk: the index of a stage, bytes."""
    if schedule.backward is None:
        return []
    copies = ops.nodes_that(schedule.forward, lambda op: op.gives is Value.SAVED_ON_HOST)
    return [(ops.arguments(c)[0].index, value_bytes(c)) for c in copies]


def stored_saved_bytes(schedule: Schedule) -> list[int]:
    """Those that wait on a disk."""
    return [size for i, size in saved_elsewhere(schedule) if i in schedule.plan.saved_on_disk]


def _waiting_bytes(schedule: Schedule) -> list[int]:
    """Those that wait on the host."""
    return [size for i, size in saved_elsewhere(schedule) if i not in schedule.plan.saved_on_disk]


def _passing_bytes(schedule: Schedule) -> int:
    """Bytes of the host buffers that saved tensors are in on their way to the disk and back."""
    return 2 * schedule.plan.saved_sets * max(stored_saved_bytes(schedule), default=0)


def disk_memory(schedules: Sequence[Schedule], cost: OptimizerCost) -> dict[MemoryKind, int]:
    """Bytes on a disk by kind, at the boundary of forward and backward."""
    states: dict[int, int] = {}
    weights: dict[int, int] = {}
    for schedule in schedules:
        for bucket in schedule.buckets:
            if bucket.key in schedule.plan.on_disk:
                trained = schedule.gradient_params.get(bucket.key, ())
                states[bucket.key] = stored_bytes(bucket, trained, cost)
            if bucket.key in schedule.plan.weights_on_disk:
                weights[bucket.key] = stored_weights_bytes(bucket)
    saved = sum(whole_pages(size) for each in schedules for size in stored_saved_bytes(each))
    found = {MemoryKind.PARAMETERS: sum(weights.values()), MemoryKind.STATES: sum(states.values())}
    found[MemoryKind.ACTIVATIONS] = saved
    return {kind: size for kind, size in found.items() if size}


def device_kinds(
    moment: MemoryMoment, schedules: Iterable[Schedule], cost: OptimizerCost
) -> dict[str, int]:
    """Bytes of device memory at a moment by kind, and of resident buckets by what it is.

    Args:
        schedules: of the step.
    """
    found = {kind.value: size for kind, size in moment.live_bytes.items()}
    residents: dict[int, tuple[Bucket, Sequence[int]]] = {}
    for schedule in schedules:
        trained = schedule.gradient_params if schedule.backward is not None else {}
        for bucket in schedule.buckets:
            if bucket.key in schedule.plan.resident:
                residents[bucket.key] = bucket, trained.get(bucket.key, ())
    for bucket, params in residents.values():
        for kind, size in streamed_bytes(bucket, params, cost).items():
            if kind not in (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS):
                found[MemoryKind.PARAMETERS.value] -= int(size)
                found[kind.value] = found.get(kind.value, 0) + int(size)
    return {kind: size for kind, size in found.items() if size}
