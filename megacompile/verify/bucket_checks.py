"""Checks of buckets: gradients and states arrive once and complete, and updates are made once.

What must hold, given [Note: happens-before] in `megacompile.ir.edges`:

- an op takes the kinds of values that it declares, of its own bucket: gradients, norms, buffers,
  states;
- norms go to the op that takes the gradients that they were computed from;
- each value is consumed once: a backward's gradients go to the next contributor, or to one sum,
  update or copy to the host; new states go to the host; a buffer is filled once;
- a part of a bucket in host memory is read before it is overwritten, and none is lost;
- every bucket that gets gradients is updated once, in its place, and no other bucket is;
- a graph returns as tokens the last ops that wrote each part of a bucket, and takes tokens only of
  existing parts;
- the device helps only with host updates whose states are on the host.

`megacompile.verify.cycle_checks` checks that graphs wait for one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import Place, given, token_of, written
from megacompile.ir.ops import Op, Part, Takes, Value, effects
from megacompile.ir.stream import Stream
from megacompile.ir.values import bucket_of, groups, kind_of, label, named, reads, taken
from megacompile.verify.hazard import Check, Hazard, HazardKind, View

_WRONG = {  # the hazard of a wrong value, by the needed kind
    Value.GRADIENTS: HazardKind.WRONG_GRADIENTS,
    Value.GRADIENTS_SO_FAR: HazardKind.WRONG_GRADIENTS,
    Value.NORMS: HazardKind.WRONG_GRADIENTS,
    Value.UPDATED: HazardKind.STATE_LOST,
    Value.STATES: HazardKind.WRONG_STATE,
    Value.WEIGHTS: HazardKind.WRONG_WEIGHTS,
    Value.GRADIENT_BUFFER: HazardKind.WRONG_BUFFER,
    Value.STATE_BUFFER: HazardKind.WRONG_BUFFER,
    Value.SAVED_BUFFER: HazardKind.WRONG_BUFFER,
}
_BUFFERS = (Value.GRADIENT_BUFFER, Value.STATE_BUFFER, Value.SAVED_BUFFER)
_PLACEHOLDERS = (Value.SAVED_ON_HOST, Value.SAVED_ON_DISK)  # in a backward
_SOURCES = (Value.GRADIENTS, Value.SAVED_ON_DISK)


def _arguments_match(view: View) -> Iterator[Hazard]:
    """An op takes a value of the declared kind, of its own bucket, and is its only consumer."""
    for node in view.that(lambda op: op.takes):
        for takes in effects(node).takes:
            value = node.args[takes.at] if takes.at < len(node.args) else None
            if not isinstance(value, fx.Node) or takes.kind is None:
                continue
            wanted, is_buffer = takes.kind.value, takes.kind in _BUFFERS
            kind = _WRONG.get(takes.kind, HazardKind.WRONG_ARGUMENT)
            if not _matches(node, takes, view.source(value)):
                message = f"{label(node)} takes the result of {label(value)} as {wanted}{_of(node)}"
                if kind is HazardKind.STATE_LOST:
                    yield view.hazard(kind, value, None, message)
                else:
                    yield view.hazard(kind, node, None if is_buffer else value, message)
            elif is_buffer and len(_ends(value)) > 1:
                message = f"{label(node)} fills {wanted} that another op fills too"
                yield view.hazard(kind, node, None, message)


def _matches(node: fx.Node, takes: Takes, value: fx.Node) -> bool:
    if takes.kind in _PLACEHOLDERS:
        return True
    if kind_of(value) is not takes.kind:
        return False
    if takes.like is not None:
        return value.args[1] is _made_of(node.args[takes.like])
    bucket = bucket_of(value)
    return bucket is not None and bucket.key == ops.bucket_of(node).key


def _made_of(value: Any) -> Any:
    """The gradients or the copy on a disk that a value was made from, or the value itself."""
    for takes in effects(value).takes if isinstance(value, fx.Node) else ():
        if takes.kind in _SOURCES and effects(value).gives is not takes.kind:
            return value.args[takes.at]
    return value


def _of(node: fx.Node) -> str:
    subject: Any = node.args[0]
    return f" of bucket {subject.label}" if isinstance(subject, Bucket) else ""


def _ends(value: fx.Node) -> list[fx.Node]:
    """The ops that consume a value."""
    return [
        user
        for user in value.users
        if any(t.ends and user.args[t.at : t.at + 1] == (value,) for t in effects(user).takes)
    ]


def _of_backwards(view: View) -> Iterator[Hazard]:
    """Each gradient that a backward returns goes to exactly one op: the next contributor or its
    consumer. Gradients that ranks share are averaged first. A backward adds only to gradients of
    its own buckets."""
    for call in view.nodes(ops.backward):
        items, own = dict(ops.items(call)), dict(groups(call))
        for index, bucket in own.items():
            value, what = items.get(index), f"gradients of bucket {bucket.label}"
            ends = [] if value is None else _ends(value)
            adders = [] if value is None else [n for n in value.users if n.target is ops.backward]
            if not ends and not adders:
                message = f"{label(call)} returns {what} that no op takes"
                yield view.hazard(HazardKind.GRADIENTS_LOST, call, None, message)
            elif ends and adders:
                message = f"{label(ends[0])} takes {what} that {label(adders[0])} still adds to"
                yield view.hazard(HazardKind.GRADIENTS_NOT_READY, ends[0], adders[0], message)
            for user in ends if bucket.ranks > 1 else ():
                if user.target is not ops.reduce_scatter:
                    message = f"{label(user)} takes {what} of this rank alone; reduce_scatter them"
                    yield view.hazard(HazardKind.WRONG_GRADIENTS, user, call, message)
        keys = {bucket.key for bucket in own.values()}
        for value in ops.arguments(call)[5]:
            got = bucket_of(value) if kind_of(value) is Value.GRADIENTS else None
            if got is not None and got.key not in keys:
                message = f"{label(call)} carries gradients of bucket {got.label}, not its own"
                yield view.hazard(HazardKind.WRONG_GRADIENTS, call, None, message)


def _summed_over_replicas(view: View) -> Iterator[Hazard]:
    """Gradients that are kept, used for norms or used for updates are the mean over replicas, with
    nothing added since. If a later backward computes the mean, they may only be kept."""
    for node in view.that(lambda op: op.takes):
        gradients, bucket, op = taken(node, Value.GRADIENTS), ops.bucket_of(node), effects(node)
        if gradients is None or bucket.replicas == 1:
            continue
        if op.gives is Value.GRADIENTS or effects(view.source(gradients)).of_replicas:
            continue
        if view.schedule.defers and op.writes == (Part.GRADIENTS,):
            continue
        message = (
            f"{label(node)} takes gradients of bucket {bucket.label} that are not summed over its "
            f"{bucket.replicas} replicas; pass the result of their all_reduce"
        )
        yield view.hazard(HazardKind.WRONG_GRADIENTS, node, gradients, message)


def _consumed(view: View) -> Iterator[Hazard]:
    """Sums and new states are consumed, new states exactly once. Norms go where the gradients go,
    because they cannot be computed again for parts of them."""
    for node, op in view.order.calls:
        if op.gives in (Value.GRADIENTS, Value.UPDATED):
            ends, updated = _ends(node), op.gives is Value.UPDATED
            if not ends or (updated and len(ends) > 1):
                took = ", ".join(map(label, ends)) or "no op"
                message = f"{label(node)} returns {op.gives.value}{_of(node)} that {took} takes"
                kind = HazardKind.STATE_LOST if updated else HazardKind.GRADIENTS_LOST
                yield view.hazard(kind, node, None, message)
        elif op.gives is Value.NORMS:
            if not any(taken(user, Value.NORMS) is node for user in node.users):
                message = f"{label(node)} returns norms that no op takes; pass them with gradients"
                yield view.hazard(HazardKind.GRADIENTS_LOST, node, None, message)


def _once(view: View) -> Iterator[Hazard]:
    """Each bucket has one update, which takes all of its gradients."""
    for first, *others in _by_bucket(view, lambda op: op.is_update).values():
        for node in others:
            message = f"{label(node)} updates its bucket again"
            yield view.hazard(HazardKind.STATE_LOST, first, node, message)


def _weights_or_masters(view: View) -> Iterator[Hazard]:
    """Updated parameters come from the bucket's slot or, as masters, with the states."""
    for node in view.that(lambda op: op.gives is Value.UPDATED):
        weights, state = taken(node, Value.WEIGHTS), taken(node, Value.STATES)
        state = None if state is None else view.source(state)
        if state is None or kind_of(state) is not Value.STATES:
            continue  # reported elsewhere
        masters = ops.arguments(state)[2]
        if weights is None and not masters:
            message = f"{label(node)} gets neither weights{_of(node)} nor masters"
            yield view.hazard(HazardKind.MISSING_WEIGHTS, node, None, message)
        elif weights is not None and masters and kind_of(weights) is Value.WEIGHTS:
            message = f"{label(node)} gets {label(weights)}, but masters with its states; pass None"
            yield view.hazard(HazardKind.WRONG_WEIGHTS, node, weights, message)


# Host memory.


def _by_bucket(view: View, wanted: Callable[[Op], object]) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in view.that(wanted):
        found[ops.bucket_of(node).key].append(node)
    return found


def _host_memory(view: View) -> Iterator[Hazard]:
    """Each part of a bucket on the host is read before it is overwritten, and never lost: between
    two writes of a bucket's gradients, the first ones are fetched to be added."""
    before = view.order.before
    for part in Part:
        readers = _by_bucket(view, lambda op, part=part: part in op.reads)  # type: ignore[misc]
        writers = _by_bucket(view, lambda op, part=part: part in op.writes)  # type: ignore[misc]
        adds = part is Part.GRADIENTS
        for key, those in writers.items():
            for reader in readers[key]:
                yield from _read_first(view, part, reader, those)
            for earlier, later in zip(those, those[1:], strict=False) if adds else ():
                between = (before(earlier, r) and before(r, later) for r in readers[key])
                if not any(between):
                    message = f"{label(later)} overwrites the gradients{_of(later)} on the host"
                    yield view.hazard(HazardKind.GRADIENTS_LOST, later, earlier, message)


def _read_first(
    view: View, part: Part, reader: fx.Node, writers: list[fx.Node]
) -> Iterator[Hazard]:
    """A reader is before every writer or, of accumulated gradients, between two writers."""
    before = view.order.before
    adds = part is Part.GRADIENTS and any(before(reader, writer) for writer in writers)
    for writer in writers:
        if before(reader, writer) or (adds and before(writer, reader)):
            continue
        if effects(reader).is_update and effects(writer).is_update:
            continue  # the same op, or reported elsewhere
        message = (
            f"{label(reader)} reads the {part.value}{_of(reader)} on the host, which "
            f"{label(writer)} may have changed by then"
        )
        changed = part is Part.GRADIENTS
        kind = HazardKind.GRADIENTS_REFILLED if changed else HazardKind.UPDATED_TOO_EARLY
        yield view.hazard(kind, reader, writer, message)


def _lent(view: View) -> Iterator[Hazard]:
    """A part that ops read in place on the device is read before it is written."""
    for lender in view.that(lambda op: op.lends):
        part, key = effects(lender).lends, ops.bucket_of(lender).key
        writers = _by_bucket(view, lambda op, part=part: part in op.writes)[key]  # type: ignore[misc]
        for writer in writers:
            for reader in lender.users:
                if lender not in reads(reader) or view.order.before(reader, writer):
                    continue
                message = f"{label(reader)} reads what {label(writer)} has changed{_of(lender)}"
                yield view.hazard(HazardKind.UPDATED_TOO_EARLY, reader, writer, message)


# Updates and tokens.


def updated_once(views: list[View]) -> Iterator[Hazard]:
    """Each bucket that gets gradients is updated once, in the backward or in the update."""
    step = views[-1]
    if step.name == "forward":
        return
    schedule, trained = step.schedule, set[int](step.schedule.gradient_params)
    if schedule.update is None:
        trained = {b.key for call in step.nodes(ops.backward) for _, b in groups(call)}
    first: dict[int, tuple[View, fx.Node]] = {}
    for view in views[1:]:
        for node in view.that(lambda op: op.is_update):
            key = ops.bucket_of(node).key
            earlier, other = first.setdefault(key, (view, node))
            if key not in trained:
                message = f"{label(node)} updates a bucket that gets no gradients"
                yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
            elif earlier is not view:
                message = f"{label(node)} updates a bucket that {label(other)} has updated"
                yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
    for bucket in schedule.buckets:
        if bucket.key in trained - first.keys():
            message = f"nothing updates bucket {bucket.label}, which gets gradients"
            yield step.hazard(HazardKind.NOT_UPDATED, step.graph.output_node(), None, message)


def _in_place(view: View) -> Iterator[Hazard]:
    """The compute stream writes the states and gradients of resident buckets, and other streams
    those of streamed ones."""
    resident = view.schedule.plan.resident
    for node in view.that(lambda op: {Part.STATES, Part.GRADIENTS} & set(op.writes)):
        bucket, stream = ops.bucket_of(node), ops.stream_of(node)
        if (bucket.key in resident) != (stream is Stream.COMPUTE):
            where = "is resident" if bucket.key in resident else "is on the host"
            states = Part.STATES in effects(node).writes
            message = (
                f"{label(node)} runs on stream {stream.value}, but bucket {bucket.label} {where}; "
                f"{'update it' if states else 'leave its gradients'} there"
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
            message = f"{node.name} is a token of a part that bucket {token.bucket.label} lacks"
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
            f"{ops.bucket_of(node).label}, but that is {named(node)}"
        )
        yield view.hazard(HazardKind.WRONG_TOKEN, node, None, message)


def _helps(view: View) -> Iterator[Hazard]:
    """The device helps only with host updates, each named once, that wait for no disk."""
    plan = view.schedule.plan
    for node in view.that(lambda op: op.helps):
        updates: Any = node.args[0]
        for k, update in enumerate(updates):
            op, wrong = effects(update), "twice" if update in updates[:k] else ""
            if not op.is_update or op.stream is not Stream.HOST:
                wrong = "which the host does not run"
            elif ops.bucket_of(update).key in plan.on_disk | plan.weights_on_disk:
                wrong = "whose bucket comes from a disk"
            if wrong:
                message = f"{label(node)} helps with {named(update)}, {wrong}"
                yield view.hazard(HazardKind.WRONG_HELP, node, update, message)


CHECKS: tuple[Check, ...] = (
    _arguments_match,
    _of_backwards,
    _summed_over_replicas,
    _consumed,
    _once,
    _weights_or_masters,
    _host_memory,
    _lent,
    _in_place,
    _tokens,
    _helps,
)
