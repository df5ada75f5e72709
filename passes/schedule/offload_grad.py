"""Offloads each bucket's gradients to the host right after the last contribution.

    before: 2B 1B 0B     after: 2B 2OFFLOAD_GRAD 1B 1OFFLOAD_GRAD 0B 0OFFLOAD_GRAD

With `accumulate=True` the gradients already on the host are fetched first and added:

    1FETCH_GRAD 1RECOMPUTE 1B 1ADD_GRAD 1OFFLOAD_GRAD

The update of a bucket may begin when its gradients are on the host, so they are not offloaded
before the last reader of its weights.

A resident bucket keeps its gradients in the memory that the backward allocated for them; nothing is
reserved in advance: `2B 2KEEP_GRAD`.
"""

from __future__ import annotations

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import groups
from megacompile.passes.edit import copied, last_item
from megacompile.passes.schedule.prefetch import last_readers


def offload_gradients(schedule: Schedule, *, accumulate: bool) -> Schedule:
    """Move every gradient to its bucket."""
    if schedule.backward is None:
        return schedule
    new, graph = copied(schedule)
    readers = last_readers(graph)
    for bucket, call, group in last_gradients(graph).values():
        total = add_so_far(graph, bucket, call, group) if accumulate else group
        where = total if accumulate else max(group, last_item(call))
        if bucket.key in new.plan.resident:
            with graph.inserting_after(where):
                ops.call(graph, ops.keep_grad, bucket, total, name=f"k{bucket.suffix}")
            continue
        reader = readers.get(bucket.key, call)
        late = reader > call
        with graph.inserting_after(max(where, last_item(reader)) if late else where):
            name = f"o{bucket.suffix}"
            node = ops.call(graph, ops.offload_grad, bucket, total, name=name)
        if late:
            compat.set_kwargs(node, {"after": (reader,)})
    return new


def last_gradients(graph: fx.Graph) -> dict[int, tuple[Bucket, fx.Node, fx.Node]]:
    """For each bucket key: the bucket, its last contributing backward, and that group of gradients.

    If ranks share a bucket, the group is the result of its `reduce_scatter`.
    """
    last: dict[int, tuple[Bucket, fx.Node, fx.Node]] = {}
    for node in ops.nodes_of(graph, ops.backward):
        items = dict(ops.items(node))
        for k, bucket in groups(node):
            group = items[k]
            reduced = next((n for n in group.users if n.target is ops.reduce_scatter), group)
            last[bucket.key] = (bucket, node, reduced)
    return last


def add_so_far(graph: fx.Graph, bucket: Bucket, call: fx.Node, group: fx.Node) -> fx.Node:
    """Fetch the gradients so far before the stage runs, and add to them after it."""
    suffix = bucket.suffix
    first = call
    while first.prev.op != "root" and _same_stage(first.prev, call):
        first = first.prev
    meta = group.meta.get("value")
    with graph.inserting_before(first):
        buffer = ops.call(graph, ops.alloc_grad, bucket, name=f"buf_g{suffix}")
        fetched = ops.call(graph, ops.fetch_grad, bucket, buffer, name=f"h{suffix}")
    with graph.inserting_after(max(group, last_item(call))):
        total = ops.call(graph, ops.add_grad, bucket, fetched, group, name=f"sum{suffix}")
    for node in (buffer, fetched, total):
        node.meta["value"] = meta
    return total


def _same_stage(node: fx.Node, call: fx.Node) -> bool:
    """True if the node is the stage's recompute, or an item of it."""
    if node.target is ops.recompute:
        return node.args[0] is call.args[0]
    return bool(
        ops.op_of(node) is None
        and node.op == "call_function"
        and isinstance(node.args[0], fx.Node)
        and node.args[0].target is ops.recompute
    )
