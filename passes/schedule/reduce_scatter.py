"""Average the gradients of a bucket over the ranks that share it; each rank keeps its own part.

    before: 2B 1B 0B     after: 2B 2REDUCE_SCATTER 1B 1REDUCE_SCATTER 0B 0REDUCE_SCATTER

It comes after the last contribution to a bucket's gradients. All that follows (sums with earlier
backwards, norms, copies to the host, updates) is about this rank's part.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.ir import ops
from megacompile.ir.buckets import shard_shape
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.offload_grad import last_gradients, last_item


def insert_reduce_scatter(schedule: Schedule, *, rank: int) -> Schedule:
    """The schedule whose backward leaves the mean over ranks.

    Args:
        rank: this process's, among those that share a bucket.
    """
    if schedule.backward is None or all(bucket.ranks == 1 for bucket in schedule.buckets):
        return schedule
    new = schedule.copy()
    graph = new.backward
    assert graph is not None
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
