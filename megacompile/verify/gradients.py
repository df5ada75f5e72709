"""The part of `verify` that is about gradients: each bucket's reach the host once, and whole.

What must hold, given [Note: happens-before] in `megacompile.verify.order`:

- the gradients that a backward gives go on to the next contributor (`carries`), to a sum, or to
  the host; those that a later contributor takes are not offloaded;
- what is carried, added and offloaded for a bucket are that bucket's gradients;
- the gradients on the host are fetched before an offload overwrites them, to memory of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.values import label, producer
from megacompile.show import python
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def _group_bucket(value: Any) -> Bucket | None:
    """The bucket whose gradients a backward gives as `value`; None if it is something else."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    call = producer(value)
    if call is value or call.target is not ops.backward:
        return None
    index = value.args[1]
    assert isinstance(index, int)
    return dict(_groups(call)).get(index)


def _groups(call: fx.Node) -> Iterator[tuple[int, Bucket]]:
    """The buckets that a backward gives gradients of, with their places in its result."""
    stage: Any = call.args[0]
    buckets = stage.buckets_read(stage.traced.gradients)
    first = python.result_count(call) - len(buckets)
    return enumerate(buckets, first)


def _gradients_kept(view: View) -> Iterator[Hazard]:
    """Each gradient goes on to exactly one place: the next contributor, the sum, or the host."""
    for call in view.nodes(ops.backward):
        taken = dict(ops.items(call))
        for index, bucket in _groups(call):
            users = list(taken[index].users) if index in taken else []
            sinks = (ops.offload_grad, ops.add_grad, ops.update)
            offloads = [n for n in users if n.target in sinks]
            carries = [n for n in users if n.target is ops.backward]
            if not offloads and not carries:
                message = (
                    f"{label(call)} gives gradients of bucket {bucket.label} that nobody takes; "
                    "offload them"
                )
                yield view.hazard(HazardKind.GRADIENTS_LOST, call, None, message)
            elif offloads and carries:
                message = (
                    f"{label(offloads[0])} takes the gradients of bucket {bucket.label} that "
                    f"{label(carries[0])} still adds to; let it take those of {label(carries[0])}"
                )
                yield view.hazard(HazardKind.GRADIENTS_NOT_READY, offloads[0], carries[0], message)
    for node in view.nodes(ops.add_grad):
        if not any(user.target in (ops.offload_grad, ops.update) for user in node.users):
            message = f"{label(node)} gives a sum that nobody takes; offload it"
            yield view.hazard(HazardKind.GRADIENTS_LOST, node, None, message)


def _gradients_match(view: View) -> Iterator[Hazard]:
    """What is carried, added and offloaded for a bucket are that bucket's gradients."""
    expected: list[tuple[fx.Node, Bucket, Any, str]] = []
    for node in view.nodes(ops.offload_grad, ops.norm_grad, ops.update, ops.hand_over):
        bucket: Any = node.args[0]
        value: Any = node.args[2 if node.target is ops.update else 1]
        if value.target is not ops.add_grad:
            expected.append((node, bucket, value, "backward or add_grad"))
        elif value.args[0].key != bucket.key:
            expected.append((node, bucket, None, "backward or add_grad"))
    for node in view.nodes(ops.add_grad):
        bucket = node.args[0]
        so_far: Any = node.args[1]
        if so_far.target is not ops.fetch_grad or so_far.args[0].key != bucket.key:
            expected.append((node, bucket, None, "fetch_grad"))
        expected.append((node, bucket, node.args[2], "backward"))
    for node, bucket, value, source in expected:
        got = _group_bucket(value)
        if got is None or got.key != bucket.key:
            message = (
                f"{label(node)} takes what are not the gradients of bucket {bucket.label}; give it "
                f"those of that bucket's {source}"
            )
            yield view.hazard(HazardKind.WRONG_GRADIENTS, node, value, message)
    for call in view.nodes(ops.backward):
        stage: Any = call.args[0]
        own = {bucket.key for bucket in stage.buckets_read(stage.traced.gradients)}
        carries: Any = call.args[5]
        for got in map(_group_bucket, carries):
            if got is not None and got.key not in own:
                message = (
                    f"{label(call)} carries gradients of bucket {got.label}, not its own; "
                    "carry those of the buckets that it reads"
                )
                yield view.hazard(HazardKind.WRONG_GRADIENTS, call, None, message)


def _norms_match(view: View) -> Iterator[Hazard]:
    """The norms that go to the host are those of the gradients that go with them."""
    for node in view.nodes(ops.offload_grad):
        norms: Any = node.args[2] if len(node.args) > 2 else None
        if norms is None or (norms.target is ops.norm_grad and norms.args[1] is node.args[1]):
            continue
        message = (
            f"{label(node)} takes what {label(norms)} gives as the norms of other gradients; give "
            "it the norm_grad of what it takes"
        )
        yield view.hazard(HazardKind.WRONG_GRADIENTS, node, norms, message)


def _gradient_buffers(view: View) -> Iterator[Hazard]:
    """A bucket's gradient buffer on the host is read before it is overwritten, by what is added."""
    for fetch in view.nodes(ops.fetch_grad):
        yield from _room(view, fetch)
    offloads, fetches = _by_bucket(view, ops.offload_grad), _by_bucket(view, ops.fetch_grad)
    for key, writers in offloads.items():
        yield from _read_first(view, fetches[key], writers)
        yield from _not_overwritten(view, fetches[key], writers)


def _by_bucket(view: View, target: Callable[..., Any]) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in view.nodes(target):
        bucket: Any = node.args[0]
        found[bucket.key].append(node)
    return found


def _read_first(view: View, fetches: list[fx.Node], offloads: list[fx.Node]) -> Iterator[Hazard]:
    """A fetch is before an offload, or between two."""
    before = view.order.before
    for fetch in fetches:
        overwritten = any(before(fetch, offload) for offload in offloads)
        for offload in offloads:
            if before(fetch, offload) or (before(offload, fetch) and overwritten):
                continue
            bucket: Any = fetch.args[0]
            message = (
                f"{label(fetch)} reads the gradients of bucket {bucket.label} on the host, which "
                f"{label(offload)} may overwrite first: no edge orders {label(fetch)} before it; "
                f"offload the sum that {label(fetch)} enters"
            )
            yield view.hazard(HazardKind.GRADIENTS_REFILLED, fetch, offload, message)


def _not_overwritten(
    view: View, fetches: list[fx.Node], offloads: list[fx.Node]
) -> Iterator[Hazard]:
    """Between two offloads of a bucket, the first one's gradients are fetched to be added."""
    before = view.order.before
    for earlier, later in zip(offloads, offloads[1:], strict=False):
        if any(before(earlier, fetch) and before(fetch, later) for fetch in fetches):
            continue
        bucket: Any = later.args[0]
        message = (
            f"{label(later)} overwrites the gradients of bucket {bucket.label} that another "
            "offload left on the host; carry those gradients, or fetch and add them"
        )
        yield view.hazard(HazardKind.GRADIENTS_LOST, later, earlier, message)


def _room(view: View, fetch: fx.Node) -> Iterator[Hazard]:
    bucket: Any = fetch.args[0]
    room: Any = fetch.args[1]
    shared = isinstance(room, fx.Node) and any(
        user is not fetch and user.target is ops.fetch_grad for user in room.users
    )
    wrong = (
        not isinstance(room, fx.Node)
        or room.target is not ops.alloc_grad
        or room.args[0].key != bucket.key  # type: ignore[union-attr]
    )
    if wrong or shared:
        what = "that another fetch fills too" if shared else f"not made for bucket {bucket.label}"
        message = f"{label(fetch)} fills memory {what}; alloc_grad(bucket_{bucket.label}) for it"
        yield view.hazard(HazardKind.WRONG_ROOM, fetch, None, message)


# Updates.


def _states(view: View) -> Iterator[Hazard]:
    """An update takes its bucket's own states, and what it gives goes back to the host once."""
    for fetch in view.nodes(ops.fetch_state):
        bucket: Any = fetch.args[0]
        room: Any = fetch.args[1]
        if room.target is not ops.alloc_state or room.args[0].key != bucket.key:
            message = (
                f"{label(fetch)} fills memory that was not made for the states of bucket "
                f"{bucket.label}; alloc_state(bucket_{bucket.label}) for it"
            )
            yield view.hazard(HazardKind.WRONG_ROOM, fetch, None, message)
    for node in view.nodes(ops.update, ops.hand_over):
        bucket = node.args[0]
        state: Any = node.args[-1]
        if state.target is not ops.fetch_state or state.args[0].key != bucket.key:
            message = (
                f"{label(node)} takes what {label(state)} gives as the states of bucket "
                f"{bucket.label}; give it that bucket's fetch_state"
            )
            yield view.hazard(HazardKind.WRONG_STATE, node, state, message)
        if node.target is ops.hand_over:
            continue
        offloads: list[Any] = [user for user in node.users if user.target is ops.offload_state]
        if [offload.args[0].key for offload in offloads] != [bucket.key]:
            took = ", ".join(label(offload) for offload in offloads) or "nobody"
            message = (
                f"{label(node)} gives new parameters and states of bucket {bucket.label} that "
                f"{took} takes to the host; let one offload_state(bucket_{bucket.label}) take them"
            )
            yield view.hazard(HazardKind.STATE_LOST, node, None, message)
        yield from _update_weights(view, node, state)
    for first, *others in _by_bucket(view, ops.update).values():
        for node in others:
            message = (
                f"{label(node)} updates bucket {node.args[0].label} again; make one update of all "  # type: ignore[union-attr]
                "its gradients"
            )
            yield view.hazard(HazardKind.STATE_LOST, first, node, message)


def _update_weights(view: View, node: fx.Node, state: Any) -> Iterator[Hazard]:
    """It reads the parameters from its bucket's slot, or with the states (masters)."""
    bucket: Any = node.args[0]
    weights: Any = node.args[1]
    masters = state.target is ops.fetch_state and state.args[2]
    if weights is None:
        if state.target is ops.fetch_state and not masters:
            message = (
                f"{label(node)} is given neither weights of bucket {bucket.label} nor masters; "
                "prefetch the bucket and pass it"
            )
            yield view.hazard(HazardKind.MISSING_WEIGHTS, node, None, message)
    elif weights.target not in ops.GIVE_WEIGHTS or weights.args[0].key != bucket.key:
        message = (
            f"{label(node)} is given what {label(weights)} gives, not bucket {bucket.label}; give "
            f"it a prefetch of bucket {bucket.label}"
        )
        yield view.hazard(HazardKind.WRONG_WEIGHTS, node, weights, message)
    elif masters:
        message = (
            f"{label(node)} is given what {label(weights)} gives, a copy of the parameters that "
            f"come with the states of bucket {bucket.label}; give it None"
        )
        yield view.hazard(HazardKind.WRONG_WEIGHTS, node, weights, message)


def _updated_last(view: View) -> Iterator[Hazard]:
    """Whoever reads a bucket or its states on the host is before the offload that changes them."""
    offloads = _by_bucket(view, ops.offload_state)
    for target in (ops.prefetch, ops.fetch_state):
        readers = _by_bucket(view, target)
        for key, writers in offloads.items():
            for reader in readers[key]:
                for writer in writers:
                    if not view.order.before(reader, writer):
                        message = (
                            f"{label(reader)} reads what {label(writer)} may have changed by then: "
                            f"no edge orders {label(reader)} before it; update behind the last "
                            "reader"
                        )
                        yield view.hazard(HazardKind.UPDATED_TOO_EARLY, reader, writer, message)


CHECKS: tuple[Check, ...] = (
    _gradients_kept,
    _gradients_match,
    _norms_match,
    _gradient_buffers,
    _states,
    _updated_last,
)
