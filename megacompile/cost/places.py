"""Sizes of buckets and saved tensors on the host and on a disk.

On the host the tensors of a part share one buffer (`megacompile.ir.buckets`). On a disk, and in the
host buffers for it, each buffer takes whole pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from megacompile.cost.memory import MemoryKind, MemoryMoment, accumulated
from megacompile.cost.optimizer import EIGHT_BITS, OptimizerCost
from megacompile.ir import ops
from megacompile.ir.buckets import ALIGNMENT_BYTES, Bucket, largest_shard, mirrored, rounded
from megacompile.ir.ops import Value
from megacompile.ir.ops.op import value_bytes
from megacompile.ir.schedule import Schedule
from megacompile.runtime.optim.blockwise import absmax_numel, quantizes

_PAGE = 4096  # unit of allocation in a scratch file
_FLOAT32 = 4.0  # bytes; states of small parameters are never in 8 bits


def flat_bytes(bucket: Bucket, indices: Iterable[int], item_of: Callable[[int], float]) -> int:
    """Bytes of a buffer with one tensor for each of some parameters. `item_of` maps the bytes of a
    streamed parameter's element to those of the tensor's."""
    items = {i: math.ceil(item_of(bucket.params[i].dtype.itemsize)) for i in indices}
    return mirrored(bucket, items)[1]


def _state_bytes(bucket: Bucket, trained: Sequence[int], cost: OptimizerCost) -> int:
    """Bytes of a rank's buffers for one optimizer state of a bucket."""
    mine = largest_shard(bucket)
    if cost.state_bytes != EIGHT_BITS:
        return flat_bytes(mine, trained, lambda item: cost.states_of(item) / cost.states)
    small = [i for i in trained if not quantizes(bucket.params[i].numel)]
    codes = sum(_codes_bytes(mine.params[i].numel) for i in {*trained}.difference(small))
    return codes + flat_bytes(mine, small, lambda item: _FLOAT32)


def stored_bytes(bucket: Bucket, trained: Iterable[int], cost: OptimizerCost) -> int:
    """Bytes of one rank's states on a disk, where each tensor has its own place; a set of host
    buffers for them is as large. `bucket` is the whole bucket, not a shard. `trained` are the
    indices of the parameters that get a gradient."""
    size, mine = 0, largest_shard(bucket)
    for i in trained if cost.states else ():
        param = mine.params[i]
        if cost.state_bytes != EIGHT_BITS:
            each = param.numel * cost.states_of(param.dtype.itemsize) / cost.states
        elif quantizes(bucket.params[i].numel):
            each = _codes_bytes(param.numel)
        else:
            each = param.numel * _FLOAT32
        size += cost.states * whole_pages(each)
    return size


def stored_weights_bytes(bucket: Bucket) -> int:
    """Bytes of a bucket's parameters on a disk, which share one place."""
    return whole_pages(bucket.size_bytes)


def whole_pages(size_bytes: float) -> int:
    """Size rounded up to whole pages of a disk."""
    return rounded(size_bytes, _PAGE)


def _codes_bytes(numel: int) -> int:
    """Bytes of a parameter's 8-bit codes and scales."""
    return rounded(numel, ALIGNMENT_BYTES) + rounded(4 * absmax_numel(numel), ALIGNMENT_BYTES)


def _read(schedules: Iterable[Schedule]) -> list[tuple[Bucket, list[int]]]:
    """The buckets that schedules read, with the indices of parameters that get a gradient."""
    buckets: dict[int, Bucket] = {}
    trained: dict[int, set[int]] = {}
    for schedule in schedules:
        buckets |= {bucket.key: bucket for bucket in schedule.buckets}
        if schedule.backward is not None:
            for key, params in schedule.gradient_params.items():
                trained.setdefault(key, set()).update(params)
    return [(bucket, sorted(trained.get(key, ()))) for key, bucket in buckets.items()]


def host_memory(
    schedules: Schedule | Iterable[Schedule],
    optimizer: OptimizerCost | None = None,
    *,
    for_step: bool = False,
) -> dict[MemoryKind, int]:
    """Host memory by kind during training: with gradients and states, and with the saved tensors
    that wait there between forward and backward. `for_step`: the schedules were made for
    `optimizer.step()`, even if `optimizer` updates in the backward; then only gradients that a
    backward adds to are counted as accumulated."""
    each = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    plans = [schedule.plan for schedule in each]
    kinds = (MemoryKind.PARAMETERS, MemoryKind.MASTERS, MemoryKind.GRADIENTS, MemoryKind.STATES)
    found = dict.fromkeys(kinds, 0)
    cost = optimizer or OptimizerCost(states=0)
    resident = {key for plan in plans for key in plan.resident}
    on_disk = {key for plan in plans for key in plan.on_disk}
    read = {key for plan in plans for key in plan.weights_on_disk}
    added_to = {b.key for one in each for b in accumulated(one, reads=for_step)}
    staged = weights = 0  # the largest bucket on a disk
    for bucket, trained in _read(each):
        key = bucket.key
        if key in resident:
            continue
        sizes = streamed_bytes(bucket, trained, cost, accumulates=key in added_to)
        if key in on_disk:
            sizes.pop(MemoryKind.STATES)
            staged = max(staged, stored_bytes(bucket, trained, cost))
        if key in read:
            sizes.pop(MemoryKind.PARAMETERS)
            weights = max(weights, stored_weights_bytes(bucket))
        for kind, size in sizes.items():
            found[kind] += size
    found[MemoryKind.STAGED] = staged * max((plan.state_sets for plan in plans), default=0)
    sets = (plan.weight_sets + plan.new_weight_sets for plan in plans)
    found[MemoryKind.STAGED] += weights * max(sets, default=0)
    found[MemoryKind.STAGED] += max(  # for saved tensors, to the disk and back
        (2 * s.plan.saved_sets * max(_stored_saved_bytes(s), default=0) for s in each), default=0
    )
    found[MemoryKind.ACTIVATIONS] = sum(
        size for one in each for i, size in saved_elsewhere(one) if i not in one.plan.saved_on_disk
    )
    return {kind: size for kind, size in found.items() if size}


def streamed_bytes(
    bucket: Bucket, trained: Sequence[int], cost: OptimizerCost, *, accumulates: bool = False
) -> dict[MemoryKind, int]:
    """Host memory of a streamed bucket, by kind. `trained` are the indices of the parameters that
    get a gradient. `accumulates`: gradients of micro-batches wait for the update in a later
    backward."""
    mine = largest_shard(bucket)
    found = {MemoryKind.PARAMETERS: mine.size_bytes}
    masters = cost.master_bytes
    if masters is not None:
        found[MemoryKind.MASTERS] = flat_bytes(mine, range(len(mine.params)), lambda _: masters)
    states = cost.states * _state_bytes(bucket, trained, cost) if cost.states else 0
    grad_of = cost.grad_of if accumulates else cost.kept_grad_of
    gradients = flat_bytes(mine, trained, grad_of)
    return {**found, MemoryKind.STATES: states, MemoryKind.GRADIENTS: gradients}


def saved_elsewhere(schedule: Schedule) -> list[tuple[int, int]]:
    """The saved tensors that wait on the host or on a disk, as (stage index, bytes)."""
    if schedule.backward is None:
        return []
    copies = ops.nodes_that(schedule.forward, lambda op: op.gives is Value.SAVED_ON_HOST)
    return [(ops.arguments(c)[0].index, value_bytes(c)) for c in copies]


def _stored_saved_bytes(schedule: Schedule) -> list[int]:
    """Sizes of the saved tensors that wait on a disk."""
    return [size for i, size in saved_elsewhere(schedule) if i in schedule.plan.saved_on_disk]


def disk_memory(schedules: Sequence[Schedule], cost: OptimizerCost) -> dict[MemoryKind, int]:
    """Disk space by kind between forward and backward."""
    on_disk = {key for schedule in schedules for key in schedule.plan.on_disk}
    stored = {key for schedule in schedules for key in schedule.plan.weights_on_disk}
    read = _read(schedules)
    found = {
        MemoryKind.PARAMETERS: sum(stored_weights_bytes(b) for b, _ in read if b.key in stored),
        MemoryKind.STATES: sum(stored_bytes(b, of, cost) for b, of in read if b.key in on_disk),
        MemoryKind.ACTIVATIONS: sum(
            whole_pages(size) for each in schedules for size in _stored_saved_bytes(each)
        ),
    }
    return {kind: size for kind, size in found.items() if size}


def device_kinds(
    moment: MemoryMoment, schedules: Sequence[Schedule], cost: OptimizerCost
) -> dict[str, int]:
    """Device memory at a moment of a step by kind, with resident buckets split into their parts."""
    found = {kind.value: size for kind, size in moment.live_bytes.items()}
    resident = {key for schedule in schedules for key in schedule.plan.resident}
    for bucket, trained in _read(schedules):
        sizes = streamed_bytes(bucket, trained, cost) if bucket.key in resident else {}
        for kind, size in sizes.items():
            if kind not in (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS):
                found[MemoryKind.PARAMETERS.value] -= size
                found[kind.value] = found.get(kind.value, 0) + size
    return {kind: size for kind, size in found.items() if size}
