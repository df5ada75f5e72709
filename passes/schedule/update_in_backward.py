"""Updates each bucket in the backward right after its gradients, which never leave the device.

    before: 2B 1B            after: 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE
                                    1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE

        0F 1F 2F             0F 1F DRAIN 2F

    of a resident bucket:    2B 2UPDATE

An update follows the bucket's last gradient and its last reader in the backward. A resident bucket
is updated in place (`update_in_place`), without copies or additional memory. For the others, the
optimizer states are fetched `lookahead` stages ahead, like the weights, in the order of the
updates. The update reads the weights from their slot; memory for the new ones is not allocated
before it runs. New weights and states are offloaded while the next stages compute. With
`accumulate`, gradients of earlier backwards are added first, as in `offload_grad`.

If ranks share a bucket, an update needs only this rank's part. If the stage of the update does not
read the bucket (an embedding), the part is fetched with the states. A prefetch would be a gather,
and ranks where the bucket is resident would not join it. Otherwise the part comes from the slot,
which those ranks keep just as long.

The frees of a backward's last updates are deferred (see `free`), because the next forward should
not begin with a wait for their copies. Its first half hides these copies; then a `drain` frees
their memory, before the backward needs it. If the plan delays more frees (`plan.state_delay`), the
drain is before the forward's last stage. A forward without a backward, as in an evaluation between
two steps, drains too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.edit import last_item, trained_bytes
from megacompile.passes.schedule.device_update import fetch_states
from megacompile.passes.schedule.free import insert_drain
from megacompile.passes.schedule.offload_grad import add_so_far, last_gradients
from megacompile.passes.schedule.prefetch import last_readers, uses


def insert_updates(
    schedule: Schedule,
    *,
    accumulate: bool,
    lookahead: int,
    masters: bool,
    updated_bytes: Callable[[int], float],
    state_bytes: Callable[[int], float],
) -> Schedule:
    """Update every bucket that gets gradients in the backward.

    The forward drains the memory whose free the previous backward deferred.

    Args:
        accumulate: add the gradients that are already on the host.
        lookahead: number of stages by which states are fetched ahead.
        masters: fetch parameters with the states, because streamed weights are copies.
        updated_bytes: maps the bytes of a streamed element to those of the element and its states,
            for the cost model.
        state_bytes: the same for its states only.
    """
    new = schedule.copy()
    graph = new.backward
    if graph is None:
        insert_drain(new.forward)
        return new
    steps, readers = uses(graph), last_readers(graph)  # before updates are inserted
    # updates, the uses that they follow, and whether the parameters come with the states
    made: list[tuple[fx.Node, int, bool]] = []
    for bucket, call, group in last_gradients(graph).values():
        total = add_so_far(graph, bucket, call, group) if accumulate else group
        last = max(call, readers.get(bucket.key, call))
        where = max(total, last_item(call), last_item(last))
        suffix = bucket.suffix
        use = next(i for i, use in enumerate(steps) if last in use.nodes)
        in_slot = bucket.ranks == 1 or bucket in steps[use].buckets
        apart = masters or not in_slot  # shared buckets are never on a disk
        if bucket.key in new.plan.resident:
            with graph.inserting_after(where):
                done = ops.call(graph, ops.update_in_place, bucket, total, name=f"u{suffix}")
            done.meta["value"] = trained_bytes(new, bucket, updated_bytes)
            done.meta["gathered"] = bucket.ranks > 1 and not apart
            continue
        with graph.inserting_after(where):
            updated = ops.call(graph, ops.update, bucket, None, total, None, name=f"new{suffix}")
        with graph.inserting_after(updated):
            ops.call(graph, ops.offload_state, bucket, updated, name=f"so{suffix}")
        made.append((updated, use, apart))
    for updated, at, apart in sorted(made):  # the first update's states come first
        bucket, weights, total, _ = ops.arguments(updated)
        where = steps[max(0, at - lookahead)].nodes[0]
        meta = trained_bytes(new, bucket, updated_bytes if apart else state_bytes)
        state = fetch_states(where, bucket, masters=apart, meta=meta)
        compat.set_args(updated, (bucket, weights, total, state))
        updated.meta["value"] = trained_bytes(new, bucket, updated_bytes)
    if made:
        insert_drain(new.forward, late=new.plan.state_delay > 1)
    return new
