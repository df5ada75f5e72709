"""Writes the graph of `optimizer.step()`: each bucket that gets gradients is updated once.

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

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import add
from megacompile.ir.ops import Part
from megacompile.ir.plan import Places, Plan, Tier
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import left_of
from megacompile.passes.edit import body_of
from megacompile.passes.schedule.insert_disk import insert_disk, insert_disk_weights
from megacompile.passes.schedule.insert_tokens import insert_tokens


def insert_update_graph(schedule: Schedule, *, helps: bool) -> Schedule:
    """Add an update graph if the backward has gradients of parameters; with `helps` the device
    helps the host."""
    trained = schedule.gradient_params if schedule.backward is not None else {}
    left = left_of(schedule)
    rest = [bucket for bucket in schedule.buckets if bucket.key in trained.keys() - left.keys()]
    graph = _update_of(rest, schedule.plan.places, helps=helps)
    for bucket in schedule.buckets:
        if bucket.key in left:
            _update_on_device(graph, bucket, *left[bucket.key])
    return replace(schedule, update=graph) if trained else schedule


def _update_of(buckets: Sequence[Bucket], places: Places, *, helps: bool) -> fx.Graph:
    """The graph that updates buckets in their places. The device does not help with states or
    weights on a disk."""
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


def _update_on_device(graph: fx.Graph, bucket: Bucket, gradients: fx.Node, state: fx.Node) -> None:
    suffix = bucket.suffix
    first = body_of(graph)
    taken = []
    for value in (gradients, state):
        with graph.inserting_before(first):
            node = graph.create_node("placeholder", value.name, name=value.name)
        node.meta["value"] = value.meta.get("value")
        taken.append(node)
    with graph.inserting_before(graph.output_node()):
        updated = ops.call(graph, ops.update, bucket, None, *taken, name=f"new{suffix}")
        ops.call(graph, ops.offload_state, bucket, updated, name=f"so{suffix}")
    updated.meta["value"] = state.meta.get("value")
