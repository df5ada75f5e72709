"""Offloads each bucket's gradients to the host right after the last contribution, with their norms.

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
    again = ops.calls_by_stage(graph, ops.recompute)
    first = again.get(ops.arguments(call)[0].index, call)
    meta = group.meta.get("value")
    with graph.inserting_before(first):
        buffer = ops.call(graph, ops.alloc_grad, bucket, name=f"buf_g{suffix}")
        fetched = ops.call(graph, ops.fetch_grad, bucket, buffer, name=f"h{suffix}")
    with graph.inserting_after(max(group, last_item(call))):
        total = ops.call(graph, ops.add_grad, bucket, fetched, group, name=f"sum{suffix}")
    for node in (buffer, fetched, total):
        node.meta["value"] = meta
    return total


def insert_norms(schedule: Schedule) -> Schedule:
    """Compute the norms of each bucket's gradients while they are on the device.

        before: 2B 2OFFLOAD_GRAD             after: 2B 2NORM_GRAD 2OFFLOAD_GRAD
        before: 2B 2UPDATE 2OFFLOAD_STATE    after: 2B 2NORM_GRAD 2UPDATE 2OFFLOAD_STATE

    They are those of the offloaded gradients, including sums over several backwards, so that
    clipping needs no pass over host memory. Gradients that an update in the backward consumes get
    only the L2 norm, too late for clipping, for logs. Gradients that stay on the device for
    `optimizer.step()` get theirs on demand, and those not averaged over replicas yet
    (`Schedule.defers`) none.

    With `lowering="eager"` and one rank this pass does not run: torch computes the norms in the
    same order as for the plain model.
    """
    if schedule.backward is None or schedule.defers:
        return schedule
    new, graph = copied(schedule)
    for node in ops.nodes_of(graph, ops.offload_grad, ops.offload_state, ops.update_in_place):
        bucket, value = ops.arguments(node)[:2]
        stays = node.target is ops.offload_grad and bucket.key in new.plan.resident
        # an L2 norm and a maximum in float32, as in torch
        if stays or not all(
            param.numel > 0 and param.dtype.is_floating_point and param.dtype.itemsize <= 4
            for param in bucket.params
        ):
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
