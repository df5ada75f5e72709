"""Take the norms of each bucket's gradients while they are on the device.

    before: 2B 2OFFLOAD_GRAD             after: 2B 2NORM_GRAD 2OFFLOAD_GRAD
    before: 2B 2UPDATE 2OFFLOAD_STATE    after: 2B 2NORM_GRAD 2UPDATE 2OFFLOAD_STATE

What is offloaded is what is measured, sums over several backwards included, so that clipping needs
no pass over host memory. Gradients that stay on the device for `optimizer.step()` are measured
there, by the code that asks.

Of gradients that an update in the backward consumes, of resident buckets too, the L2 norm alone is
taken. It is too late to clip by it, but loops log it.

Gradients that are not summed over replicas yet (`Schedule.defers`) have no norms to ask for.

With `lowering="eager"` and one rank this does not run: torch takes the norms, in the order that the
plain loop has. Ranks that share a model have it with every lowering.
"""

from __future__ import annotations

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Param
from megacompile.ir.schedule import Schedule


def insert_norms(schedule: Schedule) -> Schedule:
    """The schedule in which every gradient that leaves the backward has its norms taken along."""
    if schedule.backward is None or schedule.defers:
        return schedule
    new = schedule.copy()
    graph = new.backward
    assert graph is not None
    for node in ops.nodes_of(graph, ops.offload_grad, ops.offload_state, ops.update_in_place):
        bucket, value = ops.arguments(node)[:2]
        stays = node.target is ops.offload_grad and bucket.key in new.plan.resident
        if stays or not _have_norms(bucket):
            continue
        before, gradients = node, value
        if node.target is ops.offload_state:
            before, gradients = value, ops.arguments(value)[2]  # of the update
        consumed = node.target is not ops.offload_grad
        with graph.inserting_before(before):
            call = (bucket, gradients, False) if consumed else (bucket, gradients)
            norms = ops.call(graph, ops.norm_grad, *call, name=f"n{bucket.suffix}")
        compat.set_args(node, (bucket, value, norms))
    return new


def _have_norms(bucket: Bucket) -> bool:
    return all(map(_has_norms, bucket.params))


def _has_norms(param: Param) -> bool:
    """True if a gradient like this has an L2 norm and a largest value, in float32 as torch has."""
    return param.numel > 0 and param.dtype.is_floating_point and param.dtype.itemsize <= 4
