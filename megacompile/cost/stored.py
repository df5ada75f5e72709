"""Bytes of optimizer states, parameters and saved tensors on a disk."""

from __future__ import annotations

from collections.abc import Sequence

from megacompile.cost.memory import MemoryKind, stored_saved_bytes
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.places import stored_bytes, stored_weights_bytes, whole_pages
from megacompile.ir.schedule import Schedule


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
