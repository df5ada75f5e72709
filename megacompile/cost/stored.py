"""What optimizer states and parameters take on a disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megacompile.cost.memory import Kind
from megacompile.cost.optimizer import EIGHT_BITS, OptimizerCost
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.runtime.optim.blockwise import quantizes

_PAGE = 4096  # places in a scratch file begin and end at pages
_FLOAT32 = 4.0  # bytes, of the states of small parameters, which are never in 8 bits


def stored_bytes(bucket: Bucket, trained: Iterable[int], cost: OptimizerCost) -> int:
    """Bytes that the states of a bucket take on a disk, where each parameter's has a place.

    Args:
        trained: indices of the parameters that get a gradient.
    """
    size = 0
    for param in (bucket.params[i] for i in trained if cost.states):
        each = cost.states_of(param.dtype.itemsize) / cost.states
        if cost.state_bytes == EIGHT_BITS and not quantizes(param.numel):
            each = _FLOAT32
        size += cost.states * -(-math.ceil(param.numel * each) // _PAGE) * _PAGE
    return size


def stored_weights_bytes(bucket: Bucket) -> int:
    """Bytes that the parameters of a bucket take there, which have one place together."""
    return -(-bucket.size_bytes // _PAGE) * _PAGE


def disk_memory(schedules: Sequence[Schedule], cost: OptimizerCost) -> dict[Kind, int]:
    """Bytes on a disk by kind, of the buckets of which something lies there."""
    states: dict[int, int] = {}
    weights: dict[int, int] = {}
    for schedule in schedules:
        for bucket in schedule.buckets:
            if bucket.key in schedule.plan.on_disk:
                trained = schedule.gradient_params.get(bucket.key, ())
                states[bucket.key] = stored_bytes(bucket, trained, cost)
            if bucket.key in schedule.plan.weights_on_disk:
                weights[bucket.key] = stored_weights_bytes(bucket)
    found = {Kind.PARAMETERS: sum(weights.values()), Kind.STATES: sum(states.values())}
    return {kind: size for kind, size in found.items() if size}
