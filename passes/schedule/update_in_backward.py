"""Update each bucket right after its gradients, which then never leave the device.

    before: 2B 1B            after: 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE
                                    1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE

        0F 1F 2F             0F 1F DRAIN 2F

    of a resident bucket:    2B 2UPDATE

An update comes after the bucket's last gradient and its last reader in the backward. A bucket that
lives on the device is updated there in place (`update_in_place`), which needs no copy and no memory
next to its gradients. For the others, the optimizer states are fetched `lookahead` stages ahead, as
the weights are, in the order of the updates. The update reads the weights in their slot, and takes
memory for new ones only then. They and the states go back while the next stages compute. With
`accumulate`, what earlier backwards left in the bucket is added first, as in `offload_grad`.

Of a bucket that several ranks share, an update needs this rank's part alone. Where the stage before
it does not read the bucket (an embedding), the part comes with the states: a prefetch would be a
gather, in which ranks that have the bucket on the device would not take part. Else it comes from
the slot, which those ranks keep as long.

The last updates of a backward are deferred (see `free`), because the next forward should not begin
with a wait for their copies. Its first half hides them; then a `drain` returns their memory,
before anybody needs as much as a backward does. Where the plan lets more of them wait
(`plan.state_delay`), that is before the forward's last stage. A forward without a backward, as in
an evaluation between two steps, does it too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.edit import trained_bytes
from megacompile.passes.schedule.device_update import fetch_states
from megacompile.passes.schedule.free import insert_drain
from megacompile.passes.schedule.offload_grad import (
    add_so_far,
    last_gradients,
    last_item,
)
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
    """The schedule whose backward updates every bucket that gets gradients.

    Its forward drains what the backward before it deferred.

    Args:
        accumulate: add the gradients that are on the host already.
        lookahead: how many stages ahead states are fetched.
        masters: the parameters are fetched with the states, because what is streamed is a copy.
        updated_bytes: of one element and its states, by its bytes as streamed; for the cost model.
        state_bytes: of its states alone.
    """
    new = schedule.copy()
    graph = new.backward
    if graph is None:
        insert_drain(new.forward)
        return new
    steps, readers = uses(graph), last_readers(graph)  # before there are updates
    # updates, the uses that they follow, and whether the parameters come apart from a slot
    made: list[tuple[fx.Node, int, bool]] = []
    for bucket, call, group in last_gradients(graph).values():
        total = add_so_far(graph, bucket, call, group) if accumulate else group
        last = max(call, readers.get(bucket.key, call))
        where = max(total, last_item(call), last_item(last))
        suffix = bucket.suffix
        use = next(i for i, use in enumerate(steps) if last in use.nodes)
        in_slot = bucket.ranks == 1 or bucket in steps[use].buckets
        apart = masters or not in_slot  # what ranks share is not on a disk
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
