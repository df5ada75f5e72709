"""Let several ranks have the weights of a bucket that they share: by a gather, or by whole copies.

    a gather: each rank copies its part to the device, and they exchange them there

    before: 2PREFETCH@0 1F     after: 2PREFETCH_SHARD@0 2ALL_GATHER@0 1F

    a whole copy: the parts of all ranks lie in memory of the host that all of them map

    before: 2PREFETCH@0 1F     after: 2PREFETCH_WHOLE@0 1F

Both fill the same slot. So a slot is given to a bucket, and filled again, as without ranks; the
gather waits for the copy, and the stage for the gather. The plan says which buckets are copied
whole (`Plan.whole`).

[Note: whole copies and updates] A rank that updates its part of a bucket overwrites what other
ranks copy. Between two graphs ranks wait for one another. Within a backward that updates, the sum
of a bucket's gradients comes in between: a rank takes part in it behind its own copies. Where that
is not so, because a later stage reads the bucket without giving it a gradient, it is gathered.
"""

from __future__ import annotations

from torch import fx

from megacompile.ir import ops
from megacompile.ir.nodes import set_args
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import producer


def insert_all_gather(schedule: Schedule) -> Schedule:
    """The schedule that fetches this rank's part of each bucket, and the others' from there; or all
    parts at once."""
    if all(bucket.ranks == 1 for bucket in schedule.buckets):
        return schedule
    new = schedule.copy()
    for graph in new.graphs.values():
        whole_here = schedule.plan.whole - _read_behind_sums(graph)
        for node in ops.nodes_of(graph, ops.prefetch):
            bucket, slot = ops.arguments(node)
            if bucket.ranks == 1:
                continue
            if bucket.key in whole_here:
                node.target = ops.prefetch_whole
                continue
            node.target = ops.prefetch_shard
            with graph.inserting_after(node):
                name = f"full{node.name.removeprefix('w')}"
                whole = ops.call(graph, ops.all_gather, bucket, slot, None, name=name)
            node.replace_all_uses_with(whole)
            set_args(whole, (bucket, slot, node))
    return new


def _read_behind_sums(graph: fx.Graph) -> set[int]:
    """Keys of the buckets that the graph updates, and copies where nothing says that other ranks
    have not begun to; see the note."""
    written = {ops.bucket_of(n).key for n in ops.nodes_that(graph, _writes_weights)}
    if not written:
        return set()
    position = {node: i for i, node in enumerate(graph.nodes)}
    summed: dict[int, int] = {}  # key of a bucket -> where the gradients are made that are summed
    for node in ops.nodes_of(graph, ops.reduce_scatter):
        bucket, gradients, _ = ops.arguments(node)
        summed[bucket.key] = position[producer(gradients)]
    found = set()
    for node in ops.nodes_of(graph, ops.prefetch):
        key = ops.bucket_of(node).key
        first = min((position[user] for user in node.users), default=len(position))
        if key in written and first > summed.get(key, -1):
            found.add(key)
    return found


def _writes_weights(op: ops.Op) -> bool:
    return Part.WEIGHTS in op.writes
