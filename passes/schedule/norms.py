"""Take the norms of each bucket's gradients while they are on the device.

    before: 2B 2OFFLOAD_GRAD        after: 2B 2NORM_GRAD 2OFFLOAD_GRAD

What is offloaded is what is measured, sums over several backwards included, so that clipping needs
no pass over host memory. Gradients that stay on the device are measured there, by whoever asks.
"""

from __future__ import annotations

from megacompile.ir import ops
from megacompile.ir.buckets import Param
from megacompile.ir.schedule import Schedule


def insert_norms(schedule: Schedule) -> Schedule:
    """The schedule in which every `offload_grad` takes the norms along."""
    if schedule.backward is None:
        return schedule
    new = schedule.copy()
    assert new.backward is not None
    for node in ops.nodes_of(new.backward, ops.offload_grad):
        bucket, gradients = ops.arguments(node)
        if bucket.key in new.plan.resident or not all(map(_has_norms, bucket.params)):
            continue
        with new.backward.inserting_before(node):
            name = f"n{bucket.suffix}"
            norms = ops.call(new.backward, ops.norm_grad, bucket, gradients, name=name)
        node.args = (bucket, gradients, norms)
    return new


def _has_norms(param: Param) -> bool:
    """Has a gradient like this an L2 norm and a largest value, in float32 as torch has?"""
    return param.numel > 0 and param.dtype.is_floating_point and param.dtype.itemsize <= 4
