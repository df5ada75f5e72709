"""Take the norms of each bucket's gradients while they are on the device.

    before: 2B 2OFFLOAD_GRAD             after: 2B 2NORM_GRAD 2OFFLOAD_GRAD
    before: 2B 2UPDATE 2OFFLOAD_STATE    after: 2B 2NORM_GRAD 2UPDATE 2OFFLOAD_STATE

What is offloaded is what is measured, sums over several backwards included, so that clipping needs
no pass over host memory. Gradients that stay on the device for `optimizer.step()` are measured
there, by whoever asks.

Of gradients that an update in the backward consumes, of resident buckets too, the L2 norm alone is
taken. Nobody can clip by it any more, but loops log it.

Gradients that are not summed over replicas yet (`Schedule.defers`) have no norms to ask for.
"""

from __future__ import annotations

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Param
from megacompile.ir.nodes import set_args
from megacompile.ir.schedule import Schedule


def insert_norms(schedule: Schedule) -> Schedule:
    """The schedule in which every gradient that leaves the backward has its norms taken along."""
    if schedule.backward is None or schedule.defers:
        return schedule
    new = schedule.copy()
    assert new.backward is not None
    for node in ops.nodes_of(new.backward, ops.offload_grad):
        bucket, gradients = ops.arguments(node)
        if bucket.key in new.plan.resident or not _have_norms(bucket):
            continue
        with new.backward.inserting_before(node):
            name = f"n{bucket.suffix}"
            norms = ops.call(new.backward, ops.norm_grad, bucket, gradients, name=name)
        set_args(node, (bucket, gradients, norms))
    for node in ops.nodes_of(new.backward, ops.offload_state):
        bucket, updated = ops.arguments(node)
        if not _have_norms(bucket):
            continue
        gradients = ops.arguments(updated)[2]
        with new.backward.inserting_before(updated):
            name = f"n{bucket.suffix}"
            norms = ops.call(new.backward, ops.norm_grad, bucket, gradients, False, name=name)
        set_args(node, (bucket, updated, norms))
    for node in ops.nodes_of(new.backward, ops.update_in_place):
        bucket, gradients = ops.arguments(node)
        if not _have_norms(bucket):
            continue
        with new.backward.inserting_before(node):
            name = f"n{bucket.suffix}"
            norms = ops.call(new.backward, ops.norm_grad, bucket, gradients, False, name=name)
        set_args(node, (bucket, gradients, norms))
    return new


def _have_norms(bucket: Bucket) -> bool:
    return all(map(_has_norms, bucket.params))


def _has_norms(param: Param) -> bool:
    """Has a gradient like this an L2 norm and a largest value, in float32 as torch has?"""
    return param.numel > 0 and param.dtype.is_floating_point and param.dtype.itemsize <= 4
