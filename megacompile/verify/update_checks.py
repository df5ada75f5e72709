"""Checks of updates, and of the tokens that graphs take and return.

What must hold:

- every bucket that gets gradients is updated once, in its place, and no other bucket is;
- a graph returns as tokens the last ops that wrote each part of a bucket, and takes tokens only of
  existing parts;
- the device helps only with host updates whose states are on the host.

`megacompile.verify.cycle_checks` checks that graphs wait for one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Part, effects
from megacompile.ir.stream import Stream
from megacompile.ir.tokens import Place, given, token_of, written
from megacompile.ir.values import groups, label, named, reads
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def updated_once(views: list[View]) -> Iterator[Hazard]:
    """Each bucket that gets gradients is updated once, in the backward or in the update."""
    step = views[-1]
    if step.name == "forward":
        return
    schedule = step.schedule
    first: dict[int, tuple[View, fx.Node]] = {}
    trained = schedule.gradient_params if schedule.update is not None else _given_here(step)
    buckets = {bucket.key: bucket for bucket in schedule.buckets}
    for view in views[1:]:
        for node in view.that(lambda op: op.is_update):
            bucket = ops.bucket_of(node)
            earlier = first.setdefault(bucket.key, (view, node))
            if bucket.key not in trained:
                message = f"{label(node)} updates a bucket that gets no gradients; drop it"
                yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
            elif earlier[0] is not view:
                message = (
                    f"{label(node)} updates a bucket that {label(earlier[1])} of the "
                    f"{earlier[0].name} has updated; drop one of them"
                )
                yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
    for key in trained:
        if key not in first:
            message = (
                f"nothing updates bucket {buckets[key].label}, which gets gradients; update it "
                "once, in the backward or in the update"
            )
            yield step.hazard(HazardKind.NOT_UPDATED, step.graph.output_node(), None, message)


def _given_here(view: View) -> set[int]:
    """Keys of the buckets whose gradients a backward returns."""
    return {bucket.key for call in view.nodes(ops.backward) for _, bucket in groups(call)}


def _in_place(view: View) -> Iterator[Hazard]:
    """The compute stream writes the states and gradients of resident buckets, and other streams
    those of streamed ones."""
    resident = view.schedule.plan.resident
    for node in view.that(lambda op: _MOVES & set(op.writes)):
        bucket = ops.bucket_of(node)
        if (bucket.key in resident) != (ops.stream_of(node) is Stream.COMPUTE):
            where = "is resident" if bucket.key in resident else "is on the host"
            states = Part.STATES in effects(node).writes
            message = (
                f"{label(node)} runs on stream {ops.stream_of(node).value}, but bucket "
                f"{bucket.label} {where}; {'update it' if states else 'leave its gradients'} there"
            )
            kind = HazardKind.WRONG_UPDATE if states else HazardKind.WRONG_GRADIENTS
            yield view.hazard(kind, node, None, message)


def _tokens(view: View) -> Iterator[Hazard]:
    """A graph returns the last writers of the parts of buckets, and takes tokens only of existing
    parts."""
    schedule = view.schedule
    keys, trained = {bucket.key for bucket in schedule.buckets}, schedule.gradient_params
    for node in view.graph.find_nodes(op="placeholder"):
        token = token_of(node)
        if token is None:
            continue
        key, part = token.place
        if key not in keys or (part is not Part.WEIGHTS and key not in trained):
            message = (
                f"{node.name} is a token of the {part.value} of bucket {token.bucket.label}, which "
                "do not exist; take a token of an existing part"
            )
            yield view.hazard(HazardKind.WRONG_TOKEN, node, None, message)
        for user in node.users:
            if node in reads(user) and effects(user).frees is None:
                message = f"{label(user)} takes {node.name}, a token; pass a value"
                yield view.hazard(HazardKind.WRONG_TOKEN, user, node, message)
    if view.name == "forward":
        return
    last: dict[Place, fx.Node] = {}
    for node in view.that(lambda op: op.writes):
        last |= dict.fromkeys(written(node), node)
    got = given(view.graph)
    wrong: dict[fx.Node, list[Place]] = defaultdict(list)
    for place, node in last.items():
        if got.get(place) is not node:
            wrong[node].append(place)
    for node, places in wrong.items():
        parts = " and ".join(part.value for _, part in places)
        returned = sorted({"nothing" if n is None else n.name for n in map(got.get, places)})
        message = (
            f"it returns {', '.join(returned)} as the last to write the {parts} of bucket "
            f"{ops.bucket_of(node).label}, but that is {named(node)}; return it"
        )
        yield view.hazard(HazardKind.WRONG_TOKEN, node, None, message)


def _helps(view: View) -> Iterator[Hazard]:
    """The device helps only with host updates, each named once, that wait for no disk."""
    plan = view.schedule.plan
    for node in view.that(lambda op: op.helps):
        updates: Any = node.args[0]
        for k, update in enumerate(updates):
            op = effects(update)
            if not op.is_update or op.stream is not Stream.HOST:
                message = (
                    f"{label(node)} helps with {named(update)}, which the host does not run; "
                    "name updates of the host"
                )
                yield view.hazard(HazardKind.WRONG_HELP, node, update, message)
            elif (key := ops.bucket_of(update).key) in plan.on_disk | plan.weights_on_disk:
                what = "states" if key in plan.on_disk else "parameters"
                message = (
                    f"{label(node)} helps with {named(update)}, whose {what} come from a "
                    "disk; leave it to the host"
                )
                yield view.hazard(HazardKind.WRONG_HELP, node, update, message)
            elif update in updates[:k]:
                message = f"{label(node)} helps with {named(update)} twice; name it once"
                yield view.hazard(HazardKind.WRONG_HELP, node, update, message)


_MOVES = {Part.STATES, Part.GRADIENTS}  # parts that are in the bucket's place

CHECKS: tuple[Check, ...] = (_in_place, _tokens, _helps)
