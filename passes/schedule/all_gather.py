"""Gather the weights of a bucket that several ranks share.

    before: 2PREFETCH@0 1F     after: 2PREFETCH_SHARD@0 2ALL_GATHER@0 1F

Each rank copies its part to the device, and they exchange them there. Both ops fill the same slot.
So a slot is given to a bucket, and filled again, as without ranks; the gather waits for the copy,
and the stage for the gather.
"""

from __future__ import annotations

from megacompile.ir import ops
from megacompile.ir.nodes import set_args
from megacompile.ir.schedule import Schedule


def insert_all_gather(schedule: Schedule) -> Schedule:
    """The schedule that fetches this rank's part of each bucket, and the others' from there."""
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
            set_args(gathered, (bucket, slot, node))
    return new
