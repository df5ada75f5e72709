"""Inserts collectives of ranks that share a model: weights are gathered, gradients averaged over
ranks and over replicas, the ranks of other hosts with the same rows.

    before: 2PREFETCH@0 1F     after: 2PREFETCH_SHARD@0 2ALL_GATHER@0 1F
    before: 2B 2OFFLOAD_GRAD   after: 2B 2REDUCE_SCATTER 2ALL_REDUCE 2OFFLOAD_GRAD

`delay_reduced` overlaps these with the next stage's computes:

    before: 2B 2REDUCE_SCATTER 2NORM_GRAD 2OFFLOAD_GRAD 1RECOMPUTE 1B
    after:  2B 2REDUCE_SCATTER 1RECOMPUTE 1B 2NORM_GRAD 2OFFLOAD_GRAD
"""

from __future__ import annotations

from dataclasses import replace

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import shard_shape
from megacompile.ir.ops import Value
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import taken
from megacompile.passes.edit import copied, last_item
from megacompile.passes.schedule.updates import last_gradients


def insert_all_gather(schedule: Schedule) -> Schedule:
    """Fetch this rank's part of each bucket, then gather the other ranks' parts into the same slot.
    The gather waits for the copy, and the stage for the gather."""
    if all(bucket.ranks == 1 for bucket in schedule.buckets):
        return schedule
    new = schedule.copy()
    for graph in new.graphs.values():
        for node in ops.nodes_of(graph, ops.prefetch):
            bucket, slot = ops.arguments(node)
            if bucket.ranks == 1:
                continue
            node.target = ops.prefetch_shard
            with graph.inserting_after(node):
                name = f"full{node.name.removeprefix('w')}"
                gathered = ops.call(graph, ops.all_gather, bucket, slot, None, name=name)
            node.replace_all_uses_with(gathered)
            compat.set_args(gathered, (bucket, slot, node))
    return new


def insert_reduce_scatter(schedule: Schedule, *, rank: int) -> Schedule:
    """Average each bucket's gradients over ranks; each rank keeps its own part, number `rank`. The
    reduction follows the last contribution to a bucket's gradients; all later ops use this rank's
    part."""
    if schedule.backward is None or all(bucket.ranks == 1 for bucket in schedule.buckets):
        return schedule
    new, graph = copied(schedule)
    for bucket, call, group in last_gradients(graph).values():
        metas = tuple(
            replace(meta, shape=shard_shape(meta.shape, rank, bucket.ranks))
            for meta in group.meta.get("value", ())
        )
        with graph.inserting_after(max(group, last_item(call))):
            buffer = ops.call(graph, ops.alloc_shard, bucket, name=f"buf_r{bucket.suffix}")
        with graph.inserting_after(buffer):
            name = f"r{bucket.suffix}"
            mean = ops.call(graph, ops.reduce_scatter, bucket, group, buffer, name=name)
        buffer.meta["value"] = mean.meta["value"] = metas
    return new


def insert_all_reduce(schedule: Schedule, *, defers: bool) -> Schedule:
    """Average gradients over replicas too, or with `defers` leave that to a later backward
    (`Schedule.defers`), because the network between hosts is slow.

    This is the last step before gradients are consumed, so sums with earlier backwards come first:
    `2REDUCE_SCATTER 2ADD_GRAD 2ALL_REDUCE 2UPDATE`. If earlier gradients are averaged already, they
    are equal in all replicas, and averaging does not change them.
    """
    if schedule.backward is None or all(bucket.replicas == 1 for bucket in schedule.buckets):
        return schedule
    if defers:
        return replace(schedule, defers=True)
    new, graph = copied(schedule)
    consumers = ops.nodes_that(  # they return gradients or update with them
        graph,
        lambda op: (
            op.gives not in (Value.GRADIENTS, Value.NORMS)
            and any(takes.kind is Value.GRADIENTS and takes.ends for takes in op.takes)
        ),
    )
    for node in consumers:
        gradients = taken(node, Value.GRADIENTS)
        bucket = ops.bucket_of(node)
        if gradients is None or bucket.replicas == 1:
            continue
        with graph.inserting_after(gradients):
            name = f"a{bucket.suffix}"
            mean = ops.call(graph, ops.all_reduce, bucket, gradients, name=name)
        mean.meta["value"] = gradients.meta.get("value")
        compat.set_args(node, tuple(mean if arg is gradients else arg for arg in node.args))
    return new


def delay_reduced(schedule: Schedule) -> Schedule:
    """Delay the ops that use averaged gradients by a stage.

    Norms and updates run on the compute stream and would make it wait for the interconnect. The
    average over replicas directly follows the one over ranks. If sums with earlier backwards come
    between the two, the sums run a stage later, and the ops after the second average run two stages
    later:

        before: 2B 2REDUCE_SCATTER 2ADD_GRAD 2ALL_REDUCE 2OFFLOAD_GRAD 1B 0B
        after:  2B 2REDUCE_SCATTER 1B 2ADD_GRAD 2ALL_REDUCE 0B 2OFFLOAD_GRAD
    """
    if schedule.backward is None or not ops.nodes_of(schedule.backward, ops.reduce_scatter):
        return schedule
    new, graph = copied(schedule)
    for op in (ops.reduce_scatter, ops.all_reduce):
        for mean in ops.nodes_of(graph, op):
            following = [node for node in ops.nodes_of(graph, ops.backward) if node > mean]
            if not following:
                continue
            where, dependents = last_item(following[0]), {mean}
            for node in list(graph.nodes):
                if node.op == "output" or dependents.isdisjoint(node.all_input_nodes):
                    continue
                dependents.add(node)
                if node < where and not (node.target is ops.all_reduce and node.args[1] is mean):
                    where.append(node)
                    where = node
    return new
