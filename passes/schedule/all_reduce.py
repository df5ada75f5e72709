"""Average the gradients of a bucket over its replicas: the ranks of other hosts with the same rows.

    before: 2B 2REDUCE_SCATTER 2OFFLOAD_GRAD    after: 2B 2REDUCE_SCATTER 2ALL_REDUCE 2OFFLOAD_GRAD

It is the last that becomes of gradients before they are taken, so sums with earlier backwards
come first: `2REDUCE_SCATTER 2ADD_GRAD 2ALL_REDUCE 2UPDATE`. What earlier backwards have left may
therefore lack its sum over replicas. Where it does not, it is the same in all replicas, as is then
the mean of it.

The backward of a micro-batch that is not the last needs no such sum (`Schedule.defers`): a rank
keeps its part of the gradients anyway, and the network between hosts is slow.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.ir import ops
from megacompile.ir.nodes import set_args
from megacompile.ir.ops import Value
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import taken


def insert_all_reduce(schedule: Schedule, *, defers: bool) -> Schedule:
    """The schedule whose backward leaves the mean over replicas too.

    Args:
        defers: it does not: a later backward will.
    """
    if schedule.backward is None or all(bucket.replicas == 1 for bucket in schedule.buckets):
        return schedule
    if defers:
        return replace(schedule, defers=True)
    new = schedule.copy()
    graph = new.backward
    assert graph is not None
    for node in ops.nodes_that(graph, _takes_part):
        gradients = taken(node, Value.GRADIENTS)
        bucket = ops.bucket_of(node)
        if gradients is None or bucket.replicas == 1:
            continue
        with graph.inserting_after(gradients):
            name = f"a{bucket.suffix}"
            mean = ops.call(graph, ops.all_reduce, bucket, gradients, name=name)
        mean.meta["value"] = gradients.meta.get("value")
        set_args(node, tuple(mean if arg is gradients else arg for arg in node.args))
    return new


def _takes_part(op: ops.Op) -> bool:
    """True if an op ends the gradients of a bucket: it leaves them, or updates with them."""
    if op.gives in (Value.GRADIENTS, Value.NORMS):
        return False
    return any(takes.kind is Value.GRADIENTS and takes.ends for takes in op.takes)
