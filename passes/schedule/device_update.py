"""Leaves some buckets on the device after the backward, so that `optimizer.step()` updates them
there.

    before: 2B 1B 0B 0OFFLOAD_GRAD    after: 2B 0FETCH_STATE 1B 0B 0OFFLOAD_GRAD
    (forward: 0F 1F 2F)               (forward: 0F 1F DRAIN 2F)

On its own the host may need longer for its updates than the next forward takes, while its memory
and the h2d stream are mostly idle during the backward. So the backward fetches the parameters and
states of the buckets that the next forward reads first. It returns them with their gradients
(`schedule.left`), and the update begins with them (see `update_graph`), while the host updates the
others. The gradients are still offloaded, so that `p.grad` is complete.

The fetches are spread over the backward after its first stage, the head, when the logits have been
freed. The new values stay on the device during the next forward until they have reached the host:
see `insert_drain`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.edit import copied, trained_bytes
from megacompile.passes.schedule.free import insert_drain
from megacompile.passes.schedule.prefetch import buckets_read, uses


def insert_device_update(schedule: Schedule, *, state_bytes: Callable[[int], float]) -> Schedule:
    """Leave the buckets of `plan.device_update` on the device.

    Args:
        state_bytes: maps the bytes of a streamed element to those of the element and its states,
            for the cost model.
    """
    if schedule.backward is None or not schedule.plan.device_update:
        return schedule
    new, graph = copied(schedule)
    chosen = [
        node
        for node in ops.nodes_of(graph, ops.offload_grad)
        if ops.bucket_of(node).key in new.plan.device_update
    ]
    steps = uses(graph)
    sizes = [ops.bucket_of(node).size_bytes for node in chosen]
    first = min(1, len(steps) - 1)
    left: list[fx.Node] = []
    for k, offload in enumerate(chosen):
        bucket, gradients, *_ = ops.arguments(offload)
        share = sum(sizes[:k]) / max(sum(sizes), 1)
        where = steps[first + int(share * max(0, len(steps) - 1 - first))].nodes[0]
        meta = trained_bytes(new, bucket, state_bytes)
        left += [gradients, fetch_states(where, bucket, masters=True, meta=meta)]
    gradients_of_inputs, _, tokens = ops.returned(graph)
    compat.set_args(graph.output_node(), ((gradients_of_inputs, tuple(left), tokens),))
    if chosen:
        reads = (buckets_read(node) for node in ops.nodes_of(new.forward, ops.forward))
        last = [i for i, read in enumerate(reads) if {b.key for b in read} & new.plan.device_update]
        insert_drain(new.forward, after=max(last, default=0))
    return replace(new, left=tuple(node.name for node in left))


def fetch_states(where: fx.Node, bucket: Bucket, *, masters: bool, meta: TensorMeta) -> fx.Node:
    """Fetch a bucket's states before a node, into memory allocated there.

    Args:
        masters: fetch the parameters with them.
        meta: of states and parameters together.
    """
    graph, suffix = where.graph, bucket.suffix
    with graph.inserting_before(where):
        buffer = ops.call(graph, ops.alloc_state, bucket, masters, name=f"buf_s{suffix}")
        state = ops.call(graph, ops.fetch_state, bucket, buffer, masters, name=f"s{suffix}")
    buffer.meta["value"] = state.meta["value"] = meta
    return state
