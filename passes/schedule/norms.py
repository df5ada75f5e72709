"""Computes the norms of each bucket's gradients while they are on the device.

    before: 2B 2OFFLOAD_GRAD             after: 2B 2NORM_GRAD 2OFFLOAD_GRAD
    before: 2B 2UPDATE 2OFFLOAD_STATE    after: 2B 2NORM_GRAD 2UPDATE 2OFFLOAD_STATE

The norms are those of the offloaded gradients, including sums over several backwards, so that
clipping needs no pass over host memory. For gradients that stay on the device for
`optimizer.step()`, they are computed on demand.

For gradients that an update in the backward consumes, only the L2 norm is computed. It is too late
for clipping, but loops log it.

Gradients that are not averaged over replicas yet (`Schedule.defers`) have no norms.

With `lowering="eager"` and one rank this pass does not run: torch computes the norms in the same
order as for the plain model. With several ranks it always runs.
"""

from __future__ import annotations

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.passes.edit import copied


def insert_norms(schedule: Schedule) -> Schedule:
    """Insert norms of every gradient that leaves the backward."""
    if schedule.backward is None or schedule.defers:
        return schedule
    new, graph = copied(schedule)
    for node in ops.nodes_of(graph, ops.offload_grad, ops.offload_state, ops.update_in_place):
        bucket, value = ops.arguments(node)[:2]
        stays = node.target is ops.offload_grad and bucket.key in new.plan.resident
        if stays or not _have_norms(bucket):
            continue
        before, gradients = node, value
        if node.target is ops.offload_state:
            before, gradients = value, ops.arguments(value)[2]  # the update's
        consumed = node.target is not ops.offload_grad
        with graph.inserting_before(before):
            call = (bucket, gradients, False) if consumed else (bucket, gradients)
            norms = ops.call(graph, ops.norm_grad, *call, name=f"n{bucket.suffix}")
        compat.set_args(node, (bucket, value, norms))
    return new


def _have_norms(bucket: Bucket) -> bool:
    """True if all its gradients have an L2 norm and a maximum in float32, as in torch."""
    return all(
        param.numel > 0 and param.dtype.is_floating_point and param.dtype.itemsize <= 4
        for param in bucket.params
    )
