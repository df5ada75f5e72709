"""Checks of buckets: gradients and states arrive once and complete.

What must hold, given [Note: happens-before] in `megacompile.ir.edges`:

- an op takes the kinds of values that it declares, of its own bucket: gradients, norms, buffers,
  states;
- norms go to the op that takes the gradients that they were computed from;
- each value is consumed once: a backward's gradients go to the next contributor, or to one sum,
  update or copy to the host; new states go to the host; a buffer is filled once;
- a part of a bucket in host memory is read before it is overwritten, and none is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Op, Part, Takes, Value, effects
from megacompile.ir.values import bucket_of, groups, kind_of, label, reads, taken
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


_PLACEHOLDERS = (Value.SAVED_ON_HOST, Value.SAVED_ON_DISK)  # in a backward


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
                message = (
                    f"{label(node)} takes the result of {label(value)} as {wanted}{_of(node)}; "
                    "pass the value that was made for it"
                )
                if kind is HazardKind.STATE_LOST:
                    yield view.hazard(kind, value, None, message)
                else:
                    yield view.hazard(kind, node, None if is_buffer else value, message)
            elif is_buffer and len(_ends(value)) > 1:
                message = (
                    f"{label(node)} fills {wanted} that another op fills too; give each its own"
                )
                yield view.hazard(kind, node, None, message)


def _matches(node: fx.Node, takes: Takes, value: fx.Node) -> bool:
    if takes.kind in _PLACEHOLDERS:
        return True
    if kind_of(value) is not takes.kind:
        return False
    if takes.like is not None:
        return value.args[1] is _made_of(node.args[takes.like])
    subject: Any = node.args[0]
    bucket = bucket_of(value)
    return bucket is not None and bucket.key == subject.key


def _made_of(value: Any) -> Any:
    """The gradients or the copy on a disk that a value was made from, or the value itself."""
    for takes in effects(value).takes if isinstance(value, fx.Node) else ():
        if takes.kind in _SOURCES and effects(value).gives is not takes.kind:
            return value.args[takes.at]
    return value


_SOURCES = (Value.GRADIENTS, Value.SAVED_ON_DISK)


def _of(node: fx.Node) -> str:
    subject: Any = node.args[0]
    return f" of bucket {subject.label}" if isinstance(subject, Bucket) else ""


def _ends(value: fx.Node) -> list[fx.Node]:
    """The ops that consume a value."""
    return [user for user in value.users if _takes_to_end(user, value)]


def _takes_to_end(user: fx.Node, value: fx.Node) -> bool:
    return any(
        takes.ends and takes.at < len(user.args) and user.args[takes.at] is value
        for takes in effects(user).takes
    )


def _of_backwards(view: View) -> Iterator[Hazard]:
    """Each gradient that a backward returns goes to exactly one op: the next contributor or its
    consumer. Gradients that ranks share are averaged first. A backward adds only to gradients of
    its own buckets."""
    for call in view.nodes(ops.backward):
        items = dict(ops.items(call))
        own = dict(groups(call))
        for index, bucket in own.items():
            value = items.get(index)
            ends = [] if value is None else _ends(value)
            adders = [] if value is None else [n for n in value.users if n.target is ops.backward]
            if not ends and not adders:
                message = (
                    f"{label(call)} returns gradients of bucket {bucket.label} that no op takes; "
                    "offload them"
                )
                yield view.hazard(HazardKind.GRADIENTS_LOST, call, None, message)
            elif ends and adders:
                message = (
                    f"{label(ends[0])} takes the gradients of bucket {bucket.label} that "
                    f"{label(adders[0])} still adds to; pass those of {label(adders[0])}"
                )
                yield view.hazard(HazardKind.GRADIENTS_NOT_READY, ends[0], adders[0], message)
            for user in ends if bucket.ranks > 1 else ():
                if user.target is not ops.reduce_scatter:
                    message = (
                        f"{label(user)} takes gradients of bucket {bucket.label} that only this "
                        "rank has contributed to; pass the result of their reduce_scatter"
                    )
                    yield view.hazard(HazardKind.WRONG_GRADIENTS, user, call, message)
        keys = {bucket.key for bucket in own.values()}
        partial_gradients: Any = call.args[5]
        for value in partial_gradients:
            got = bucket_of(value) if kind_of(value) is Value.GRADIENTS else None
            if got is not None and got.key not in keys:
                message = (
                    f"{label(call)} carries gradients of bucket {got.label}, not its own; "
                    "carry those of the buckets that it reads"
                )
                yield view.hazard(HazardKind.WRONG_GRADIENTS, call, None, message)


def _summed_over_replicas(view: View) -> Iterator[Hazard]:
    """Gradients that are kept, used for norms or used for updates are the mean over replicas, with
    nothing added since. If a later backward computes the mean, they may only be kept."""
    for node in view.that(lambda op: op.takes):
        gradients = taken(node, Value.GRADIENTS)
        bucket: Any = node.args[0]
        if gradients is None or bucket.replicas == 1:
            continue
        op = effects(node)
        if op.gives is Value.GRADIENTS or effects(view.source(gradients)).of_replicas:
            continue
        if view.schedule.defers and op.writes == (Part.GRADIENTS,):
            continue
        message = (
            f"{label(node)} takes gradients of bucket {bucket.label} that are not summed over its "
            f"{bucket.replicas} replicas; pass the result of their all_reduce"
        )
        yield view.hazard(HazardKind.WRONG_GRADIENTS, node, gradients, message)


_BUFFERS = (Value.GRADIENT_BUFFER, Value.STATE_BUFFER, Value.SAVED_BUFFER)


def _consumed(view: View) -> Iterator[Hazard]:
    """Sums and new states are consumed, new states exactly once. Norms go where the gradients go,
    because they cannot be computed again for parts of them."""
    for node, op in view.order.calls:
        if op.gives in (Value.GRADIENTS, Value.UPDATED):
            ends, updated = _ends(node), op.gives is Value.UPDATED
            if not ends or (updated and len(ends) > 1):
                took = ", ".join(map(label, ends)) or "no op"
                message = (
                    f"{label(node)} returns {op.gives.value}{_of(node)} that {took} takes; offload "
                    "once"
                )
                kind = HazardKind.STATE_LOST if updated else HazardKind.GRADIENTS_LOST
                yield view.hazard(kind, node, None, message)
        elif op.gives is Value.NORMS:
            if not any(taken(user, Value.NORMS) is node for user in node.users):
                message = (
                    f"{label(node)} returns norms that no op takes; pass them with the gradients"
                )
                yield view.hazard(HazardKind.GRADIENTS_LOST, node, None, message)


def _once(view: View) -> Iterator[Hazard]:
    """Each bucket has one update, which takes all of its gradients."""
    for first, *others in _by_bucket(view, lambda op: op.is_update).values():
        for node in others:
            message = f"{label(node)} updates its bucket again; use one update"
            yield view.hazard(HazardKind.STATE_LOST, first, node, message)


def _weights_or_masters(view: View) -> Iterator[Hazard]:
    """Updated parameters come from the bucket's slot or, as masters, with the states."""
    for node in view.that(lambda op: op.gives is Value.UPDATED):
        weights, state = taken(node, Value.WEIGHTS), taken(node, Value.STATES)
        state = None if state is None else view.source(state)
        if state is None or kind_of(state) is not Value.STATES:
            continue  # reported elsewhere
        bucket, masters = ops.arguments(node)[0], ops.arguments(state)[2]
        if weights is None and not masters:
            message = (
                f"{label(node)} gets neither weights of bucket {bucket.label} nor masters; "
                "prefetch the bucket and pass it"
            )
            yield view.hazard(HazardKind.MISSING_WEIGHTS, node, None, message)
        elif weights is not None and masters and kind_of(weights) is Value.WEIGHTS:
            message = (
                f"{label(node)} gets the result of {label(weights)}, a copy of the parameters "
                f"that come with the states of bucket {bucket.label}; pass None"
            )
            yield view.hazard(HazardKind.WRONG_WEIGHTS, node, weights, message)


# Host memory.


def _by_bucket(view: View, wanted: Callable[[Op], object]) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in view.that(wanted):
        found[ops.arguments(node)[0].key].append(node)
    return found


def _host_memory(view: View) -> Iterator[Hazard]:
    """Each part of a bucket on the host is read before it is overwritten, and never lost."""
    for part in Part:
        readers = _by_bucket(view, lambda op, part=part: part in op.reads)  # type: ignore[misc]
        writers = _by_bucket(view, lambda op, part=part: part in op.writes)  # type: ignore[misc]
        for key, those in writers.items():
            yield from _read_first(view, part, readers[key], those)
            if part is Part.GRADIENTS:
                yield from _not_overwritten(view, readers[key], those)


def _read_first(
    view: View, part: Part, readers: list[fx.Node], writers: list[fx.Node]
) -> Iterator[Hazard]:
    """A reader is before every writer or, of accumulated gradients, between two writers."""
    before = view.order.before
    for reader in readers:
        adds = part is Part.GRADIENTS and any(before(reader, writer) for writer in writers)
        for writer in writers:
            if before(reader, writer) or (adds and before(writer, reader)):
                continue
            if effects(reader).is_update and effects(writer).is_update:
                continue  # the same op, or reported elsewhere
            message = (
                f"{label(reader)} reads the {part.value}{_of(reader)} on the host, which "
                f"{label(writer)} may have changed by then: no edge orders {label(reader)} before "
                "it; write after the last reader"
            )
            changed = part is Part.GRADIENTS
            kind = HazardKind.GRADIENTS_REFILLED if changed else HazardKind.UPDATED_TOO_EARLY
            yield view.hazard(kind, reader, writer, message)


def _lent(view: View) -> Iterator[Hazard]:
    """A part that ops read in place on the device is read before it is written."""
    for lender in view.that(lambda op: op.lends):
        part, bucket = effects(lender).lends, ops.arguments(lender)[0]
        assert part is not None
        writers = _by_bucket(view, lambda op, part=part: part in op.writes)  # type: ignore[misc]
        for writer in writers[bucket.key]:
            for reader in lender.users:
                if lender not in reads(reader) or view.order.before(reader, writer):
                    continue
                message = (
                    f"{label(reader)} reads the {part.value}{_of(lender)} on the device, which "
                    f"{label(writer)} has changed by then; update after the last reader"
                )
                yield view.hazard(HazardKind.UPDATED_TOO_EARLY, reader, writer, message)


def _not_overwritten(
    view: View, readers: list[fx.Node], writers: list[fx.Node]
) -> Iterator[Hazard]:
    """Between two writes of a bucket's gradients, the first ones are fetched to be added."""
    before = view.order.before
    for earlier, later in zip(writers, writers[1:], strict=False):
        if any(before(earlier, reader) and before(reader, later) for reader in readers):
            continue
        message = (
            f"{label(later)} overwrites the gradients{_of(later)} that another offload left on the "
            "host; carry those gradients, or fetch and add them"
        )
        yield view.hazard(HazardKind.GRADIENTS_LOST, later, earlier, message)


CHECKS: tuple[Check, ...] = (
    _arguments_match,
    _of_backwards,
    _summed_over_replicas,
    _consumed,
    _once,
    _weights_or_masters,
    _host_memory,
    _lent,
)
