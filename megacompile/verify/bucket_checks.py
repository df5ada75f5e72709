"""Checks of results and buckets: each result is consumed once, and each bucket updated once.

`megacompile.verify.cycle_checks` checks the order of all accesses to parts of buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.edges import Place, given, token_of, written
from megacompile.ir.ops import Part, Value, effects
from megacompile.ir.stream import Stream
from megacompile.ir.values import groups, label, named, reads, taken
from megacompile.verify.hazard import Check, Hazard, HazardKind, View

# Results.

_BUFFERS = (Value.GRADIENT_BUFFER, Value.STATE_BUFFER, Value.SAVED_BUFFER)
_CONSUMED = (Value.GRADIENTS, Value.UPDATED, *_BUFFERS)


def _consumed(view: View) -> Iterator[Hazard]:
    """Each result that an op takes over is consumed once: a backward's gradients go to the next
    contributor, or to one sum, update or copy to the host; new states go to the host; a buffer is
    filled once. Norms and copies of saved tensors are not lost."""
    returned = set(view.graph.output_node().all_input_nodes)
    for node, op in view.order.calls:
        takers: list[list[fx.Node]] = []
        if op.gives in _CONSUMED:
            takers = [_ends(node)]
        elif node.target is ops.backward:
            items = dict(ops.items(node))
            users = [list(items[k].users) if k in items else [] for k, _ in groups(node)]
            takers = [
                [u for u in each if u.target is ops.backward or _ends(items[k], u)]
                for each, (k, _) in zip(users, groups(node), strict=True)
            ]
        elif op.gives is Value.NORMS:
            takers = [[u for u in node.users if taken(u, Value.NORMS) is node][:1]]
        elif op.to_backward and node not in returned:
            takers = [_writes(node)[:1]]
        for each in takers:
            if len(each) != 1:
                took = " and ".join(map(label, each)) or "no op"
                message = f"{label(node)} returns a value that {took} takes; pass it to one op"
                yield view.hazard(HazardKind.LOST, node, None, message)


def _ends(value: fx.Node, *users: fx.Node) -> list[fx.Node]:
    """The ops that consume a value, of all its users or of some."""
    return [
        user
        for user in users or value.users
        if any(t.ends and user.args[t.at : t.at + 1] == (value,) for t in effects(user).takes)
    ]


def _writes(copy: fx.Node) -> list[fx.Node]:
    """The ops that write a copy on the host to a disk."""
    writes = (user for user in copy.users if effects(user).gives is Value.SAVED_ON_DISK)
    return [write for write in writes if taken(write, Value.SAVED_ON_HOST) is copy]


def _averaged(view: View) -> Iterator[Hazard]:
    """Gradients that ranks share are averaged over ranks before anything else takes them. Those
    that are kept, used for norms or used for updates are the mean over replicas, with nothing added
    since. If a later backward computes the mean, they may only be kept."""
    for node in view.that(lambda op: op.takes):
        gradients, op = taken(node, Value.GRADIENTS), effects(node)
        if gradients is None:
            continue
        bucket, maker = ops.bucket_of(node), view.source(gradients)
        raw = maker.op != "placeholder" and maker.target not in (*_MEANS, ops.add_grad)
        lacks = ""
        if bucket.ranks > 1 and raw and node.target is not ops.reduce_scatter:
            lacks = "reduce_scatter"
        elif bucket.replicas > 1 and op.gives is not Value.GRADIENTS:
            kept = view.schedule.defers and op.writes == (Part.GRADIENTS,)
            lacks = "" if kept or effects(maker).of_replicas else "all_reduce"
        if lacks:
            message = (
                f"{label(node)} takes gradients of bucket {bucket.label} of this rank alone; pass "
                f"the result of their {lacks}"
            )
            yield view.hazard(HazardKind.WRONG_ARGUMENT, node, gradients, message)


_MEANS = (ops.reduce_scatter, ops.all_reduce)

# Updates.


def updates(views: list[View]) -> Iterator[Hazard]:
    """Each bucket that gets gradients is updated once, in the backward or in the update. The
    compute stream writes the states and gradients of resident buckets, and other streams those of
    streamed ones."""
    schedule, step = views[0].schedule, views[-1]
    trained = set[int](schedule.gradient_params)
    if schedule.update is None:
        backwards = ops.nodes_of(step.graph, ops.backward)
        trained = {b.key for call in backwards for _, b in groups(call)}
    first: dict[int, fx.Node] = {}
    for view in views:
        for node in view.that(lambda op: op.is_update):
            bucket = ops.bucket_of(node)
            if bucket.key not in trained:
                message = f"{label(node)} updates a bucket that gets no gradients"
                yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
            elif bucket.key in first:
                message = f"{label(node)} updates its bucket again"
                yield view.hazard(HazardKind.WRONG_UPDATE, node, first[bucket.key], message)
            first.setdefault(bucket.key, node)
        for node in view.that(lambda op: {Part.STATES, Part.GRADIENTS} & set(op.writes)):
            bucket, stream = ops.bucket_of(node), ops.stream_of(node)
            is_resident = bucket.key in schedule.plan.resident
            if is_resident != (stream is Stream.COMPUTE):
                message = (
                    f"{label(node)} runs on stream {stream.value}, but bucket {bucket.label} is "
                    f"{'resident' if is_resident else 'on the host'}"
                )
                yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
    for bucket in schedule.buckets if step.name != "forward" else ():
        if bucket.key in trained - first.keys():
            message = f"nothing updates bucket {bucket.label}, which gets gradients"
            yield step.hazard(HazardKind.WRONG_UPDATE, step.graph.output_node(), None, message)


def _helps(view: View) -> Iterator[Hazard]:
    """The device helps only with host updates, each named once, that wait for no disk."""
    plan = view.schedule.plan
    for node in view.that(lambda op: op.helps):
        named_updates: Any = node.args[0]
        for k, update in enumerate(named_updates):
            op, wrong = effects(update), "twice" if update in named_updates[:k] else ""
            if not op.is_update or op.stream is not Stream.HOST:
                wrong = "which the host does not run"
            elif ops.bucket_of(update).key in plan.on_disk | plan.weights_on_disk:
                wrong = "whose bucket comes from a disk"
            if wrong:
                message = f"{label(node)} helps with {named(update)}, {wrong}"
                yield view.hazard(HazardKind.WRONG_HELP, node, update, message)


def _tokens(view: View) -> Iterator[Hazard]:
    """A graph returns the last writers of the parts of buckets, and takes tokens only of existing
    parts."""
    schedule = view.schedule
    keys, trained = {bucket.key for bucket in schedule.buckets}, schedule.gradient_params
    for node in view.graph.find_nodes(op="placeholder"):
        token = token_of(node)
        parts = trained if token is not None and token.part is not Part.WEIGHTS else keys
        if token is not None and token.bucket.key not in parts:
            message = f"{node.name} is a token of a part that bucket {token.bucket.label} lacks"
            yield view.hazard(HazardKind.HANDED_ON, node, None, message)
    if view.name == "forward":
        return
    last: dict[Place, fx.Node] = {}
    for node in view.that(lambda op: op.writes):
        last |= dict.fromkeys(written(node), node)
    got = given(view.graph)
    for node in dict.fromkeys(node for place, node in last.items() if got.get(place) is not node):
        message = f"it does not return {named(node)}, the last to write a part of its bucket"
        yield view.hazard(HazardKind.HANDED_ON, node, None, message)


# Disks.


def _on_disk(view: View) -> Iterator[Hazard]:
    """Parts of buckets on a disk are used after a read and written after a change; no other parts
    are read or written there."""
    plan, before = view.schedule.plan, view.order.before
    for part, keys in ((Part.STATES, plan.on_disk), (Part.WEIGHTS, plan.weights_on_disk)):
        touching = view.that(lambda op, part=part: part in (*op.reads, *op.writes))  # type: ignore[misc]
        stored = [node for node in touching if effects(node).on_disk]
        from_disk = [node for node in stored if ops.stream_of(node) is Stream.READ]
        to_disk = [node for node in stored if ops.stream_of(node) is Stream.WRITE]
        for node in touching:
            wrong = ""
            if ops.bucket_of(node).key not in keys:
                wrong = f"touches {part.value} that are elsewhere; drop it" * (node in stored)
            elif part in effects(node).writes and node not in stored:
                if not any(before(node, write) for write in _same_bucket(node, to_disk)):
                    wrong = f"makes new {part.value}, which no op writes to the disk"
            elif part is Part.WEIGHTS and len(_same_bucket(node, to_disk)) > 1 and node in to_disk:
                wrong = "runs twice, but there is one buffer"
            if wrong:
                yield view.hazard(HazardKind.DISK, node, None, f"{label(node)} {wrong}")
            if part is Part.STATES and node not in from_disk and ops.bucket_of(node).key in keys:
                if not any(before(read, node) for read in _same_bucket(node, from_disk)):
                    message = f"{label(node)} uses states on a disk, but no read is before it"
                    yield view.hazard(HazardKind.DISK, node, None, message)
        if part is Part.WEIGHTS:
            users = [n for n in touching if n not in stored and ops.bucket_of(n).key in keys]
            yield from _weights_read(view, users, from_disk)


def _same_bucket(node: fx.Node, others: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes among `others` with the same bucket."""
    key = ops.bucket_of(node).key
    return [other for other in others if ops.bucket_of(other).key == key]


def _weights_read(
    view: View, users: Sequence[fx.Node], from_disk: Sequence[fx.Node]
) -> Iterator[Hazard]:
    """A prefetch or an update names its own read of its bucket."""
    takers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in users:
        if Part.WEIGHTS not in effects(node).reads:
            continue
        wanted = ops.read_weights if effects(node).fills_slot else ops.read_trained
        own = [
            n
            for n in _same_bucket(node, from_disk)
            if n.target is wanted and n in node.all_input_nodes
        ]
        for read in own:
            takers[read].append(node)
        if len(own) != 1:
            message = f"{label(node)} reads parameters on a disk, but names {len(own)} reads"
            yield view.hazard(HazardKind.DISK, node, None, message)
    for read in from_disk:
        if len(takers[read]) != 1:
            message = f"{label(read)} takes a buffer that {len(takers[read])} ops return"
            yield view.hazard(HazardKind.DISK, read, None, message)


def _buffers(view: View) -> Iterator[Hazard]:
    """Staging buffers of the disk are each returned once, and there are enough."""
    lent: list[fx.Node] = []  # the ops that return the buffers
    sets = view.schedule.plan.saved_sets
    for node in view.that(lambda op: op.gives is Value.SAVED_ON_HOST):
        if taken(node, Value.SAVED_ON_DISK) is None and not _writes(node):
            continue  # it waits on the host
        users = [user for user in node.users if node in reads(user)]
        if len(users) != 1:
            others = ", ".join(map(label, users)) or "no op"
            message = f"{label(node)} takes a buffer that {others} return; pass it to one op"
            yield view.hazard(HazardKind.DISK, node, None, message)
            continue
        taken_still = [end for end in lent if not view.order.before(end, node)]
        if len(taken_still) >= sets:
            end = taken_still[0]
            message = (
                f"{label(node)} takes a buffer before {label(end)} has returned one of {sets}; "
                f"add after=({end.name},) to it"
            )
            yield view.hazard(HazardKind.TOO_MANY_BUFFERS, node, end, message)
        lent.append(users[0])


CHECKS: tuple[Check, ...] = (_consumed, _averaged, _helps, _tokens, _on_disk, _buffers)
