"""Gradients of buckets go to the host, or are used by updates: in `optimizer.step()` or in the
backward.

    before: 2B 1B 0B     after: 2B 2OFFLOAD_GRAD 1B 1OFFLOAD_GRAD 0B 0OFFLOAD_GRAD

`offload_gradients` offloads each bucket's gradients right after the last contribution. With
`accumulate=True` those already on the host are fetched first and added:

    1FETCH_GRAD 1RECOMPUTE 1B 1ADD_GRAD 1OFFLOAD_GRAD

The update of a bucket may begin when its gradients are on the host, so they are not offloaded
before the last reader of its weights. A resident bucket keeps its gradients in the memory that the
backward allocated for them; nothing is reserved in advance: `2B 2KEEP_GRAD`.

    before: 2B 1B 0B 0OFFLOAD_GRAD    after: 2B 0FETCH_STATE 1B 0B 0OFFLOAD_GRAD
    (forward: 0F 1F 2F)               (forward: 0F 1F DRAIN 2F)

The host may need longer for its updates than the next forward takes, while its memory and the h2d
stream are mostly idle during the backward. So `insert_device_update` fetches parameters and states
of the buckets that the next forward reads first, and the backward leaves them with their gradients
(`schedule.left`) for the update. The gradients are still offloaded, so that `p.grad` is complete.
The fetches begin after the backward's first stage, the head, when the logits have been freed.

    before: 2B 1B            after: 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE
                                    1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE
    of a resident bucket:    2B 2UPDATE

With `insert_updates` gradients never leave the device. An update follows the bucket's last gradient
and its last reader in the backward, and reads the weights from their slot; memory for new weights
is allocated when it runs. If ranks share a bucket, an update needs only this rank's part. If
its stage does not read the bucket (an embedding), the part is fetched with the states, because a
prefetch would be a gather, which ranks where the bucket is resident would not join.

New values stay on the device during the next forward until they have reached the host: the frees of
the last ones are deferred to a drain (see `insert_drain`).

`insert_update_graph` writes the graph of `optimizer.step()`: each bucket that gets gradients is
updated once.

    before: 2B 1B 0B        after: 2B 1B 0B | 1UPDATE 2UPDATE HELP_HOST 0UPDATE 0OFFLOAD_STATE

Buckets are updated in the order in which the next forward reads them. Threads update those in host
memory (`update_host`), and the device helps unless they wait for a disk (`help_host`). The compute
stream updates resident buckets, and those that the backward left on the device (`schedule.left`),
whose new values then go to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import add
from megacompile.ir.ops import Part
from megacompile.ir.plan import Places, Plan, Tier
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.values import groups, left_of
from megacompile.passes.edit import body_of, copied, last_item, trained_bytes
from megacompile.passes.schedule.free import insert_drain, insert_tokens
from megacompile.passes.schedule.insert_disk import insert_disk, insert_disk_weights
from megacompile.passes.schedule.prefetch import buckets_read, last_readers, uses


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

    The norms are of the offloaded gradients, with sums over several backwards, so that clipping
    needs no pass over host memory. Gradients that an update in the backward consumes get only the
    L2 norm: it is for logs and comes too late for clipping. Gradients that stay on the device for
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


def insert_device_update(schedule: Schedule, *, state_bytes: Callable[[int], float]) -> Schedule:
    """Leave the buckets of `plan.device_update` on the device. `state_bytes` maps the bytes of a
    streamed element to those of the element and its states, for the cost model."""
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
    """Fetch a bucket's states before a node, into memory allocated there; with `masters`, the
    parameters too. `meta` describes them together."""
    graph, suffix = where.graph, bucket.suffix
    with graph.inserting_before(where):
        buffer = ops.call(graph, ops.alloc_state, bucket, masters, name=f"buf_s{suffix}")
        state = ops.call(graph, ops.fetch_state, bucket, buffer, masters, name=f"s{suffix}")
    buffer.meta["value"] = state.meta["value"] = meta
    return state


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

    Args:
        accumulate: add the gradients that are already on the host.
        lookahead: number of stages by which states are fetched ahead.
        masters: fetch parameters with the states, because streamed weights are copies.
        updated_bytes: maps the bytes of a streamed element to those of the element and its states.
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


def insert_update_graph(schedule: Schedule, *, helps: bool) -> Schedule:
    """Add an update graph if the backward has gradients of parameters; with `helps` the device
    helps the host."""
    trained = schedule.gradient_params if schedule.backward is not None else {}
    left = left_of(schedule)
    rest = [bucket for bucket in schedule.buckets if bucket.key in trained.keys() - left.keys()]
    graph = _update_of(rest, schedule.plan.places, helps=helps)
    for bucket in [bucket for bucket in schedule.buckets if bucket.key in left]:  # on the device
        taken = []
        with graph.inserting_before(body_of(graph)):
            for value in left[bucket.key]:
                node = graph.create_node("placeholder", value.name, name=value.name)
                node.meta["value"] = value.meta.get("value")
                taken.append(node)
        with graph.inserting_before(graph.output_node()):
            name = f"new{bucket.suffix}"
            updated = ops.call(graph, ops.update, bucket, None, *taken, name=name)
            ops.call(graph, ops.offload_state, bucket, updated, name=f"so{bucket.suffix}")
        updated.meta["value"] = taken[1].meta["value"]
    return replace(schedule, update=graph) if trained else schedule


def _update_of(buckets: Sequence[Bucket], places: Places, *, helps: bool) -> fx.Graph:
    """The graph that updates buckets in their places; no help with those on a disk."""
    graph = fx.Graph()
    graph.output(((),))
    made: list[fx.Node] = []
    first = graph.output_node()
    for k, bucket in enumerate(buckets):
        op = ops.update_resident if bucket.key in places.resident else ops.update_host
        gradients = add(graph, bucket, Part.GRADIENTS, first)
        with graph.inserting_before(graph.output_node()):
            name = f"u{bucket.suffix}"
            done = ops.call(graph, op, bucket, name=name, after=(gradients,))
        first = first if k else done
        if op is ops.update_host and Tier.DISK not in places[bucket.key]:
            made.append(done)
    if helps and made:
        with graph.inserting_before(graph.output_node()):
            ops.call(graph, ops.help_host, tuple(made))
    return graph


def rest_of(
    buckets: Sequence[Bucket],
    places: Places,
    *,
    helps: bool,
    state_bytes: Callable[[int], float] = float,
) -> Schedule:
    """A schedule with only an update, for buckets that no other schedule updates. `state_bytes`
    maps the bytes of a streamed element to those of its states."""
    forward = fx.Graph()
    forward.output(((), ()))
    plan = Plan(places.only({bucket.key for bucket in buckets}))
    update = _update_of(buckets, places, helps=helps)
    name, rest = "the rest of a step", tuple(buckets)
    schedule = Schedule(name, forward, None, (), plan=plan, update=update, rest=rest)
    schedule = insert_disk(schedule, state_bytes=state_bytes)
    return insert_tokens(insert_disk_weights(schedule))
