"""Checks of memory: slots, lifetimes, in-place changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Slot
from megacompile.ir.edges import token_of
from megacompile.ir.ops import Op
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.ir.values import label, memory, named, outliving, owns, producer, reads, sharing
from megacompile.text import format_bytes
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def _slot(node: fx.Node) -> Slot:
    at = ops.effects(node).slot
    slot: Any = None if at is None else node.args[at]
    return slot if isinstance(slot, Slot) else Slot(-1, 0)  # None: before `assign_slots`


def _held(op: Op) -> bool:
    """True if the op takes a bucket that is already in a slot."""
    return op.slot is not None and not op.fills_slot


def _slots_fit(view: View) -> Iterator[Hazard]:
    sizes = {slot.index: slot.size_bytes for slot in view.schedule.slots}
    for node in view.that(lambda op: op.slot is not None):
        bucket, slot = ops.bucket_of(node), _slot(node)
        where = f"{label(node)} takes bucket {bucket.label} of {format_bytes(bucket.size_bytes)}"
        size = min(sizes.get(slot.index, 0), slot.size_bytes)
        if size < bucket.size_bytes:
            message = f"{where} to slot {slot.index} of {format_bytes(size)}"
            yield view.hazard(HazardKind.WRONG_SLOT, node, None, message)


def _slots_in_order(view: View) -> Iterator[Hazard]:
    """The last reader of a slot's content is before the next prefetch into it. Checking neighbors
    is enough: prefetches share a stream, so an op before one is before the next."""
    contents: dict[int, list[list[fx.Node]]] = defaultdict(lambda: [[]])
    for node in view.that(_held):
        contents[_slot(node).index][0].append(node)  # filled before this graph
    for node in view.that(lambda op: op.fills_slot):
        contents[_slot(node).index].append([node])
    begin = next(iter(view.that(lambda op: op.begins)), None)
    for index, of_slot in contents.items():
        if len(of_slot) > 1 and not (begin and view.order.before(begin, of_slot[1][0])):
            first = of_slot[1][0]
            message = (
                f"{label(first)} is the first to fill slot {index}, which an earlier schedule may "
                "still read: no edge orders BEGIN before it"
            )
            yield view.hazard(HazardKind.SLOT_REFILLED, first, begin, message)
        for content, (following,) in zip(of_slot, of_slot[1:], strict=False):
            yield from _readers_done(view, content, following)


def _readers_done(view: View, content: list[fx.Node], following: fx.Node) -> Iterator[Hazard]:
    """The readers of a slot's `content` are before `following`, which refills it. An `all_gather`,
    which fills the rest of a slot, counts as a reader of its part."""
    readers = [(n, w) for w in content for n in w.users if w in reads(n) and n is not following]
    late = [pair for pair in readers if not view.order.before(pair[0], following)]
    late.sort(key=lambda pair: view.order.position[pair[0]])
    for reader, weights in late[-1:]:
        fill, stage = label(following), reader.args[0]
        name = f"stage {stage.name!r} " if isinstance(stage, Stage) else ""
        message = (
            f"{label(reader)} reads {name}bucket {ops.bucket_of(weights).label} in slot "
            f"{_slot(weights).index}, but {fill} may overwrite it first: no edge orders "
            f"{label(reader)} before it; raise slots, or add after=({label(reader)}) to {fill}"
        )
        yield view.hazard(HazardKind.SLOT_REFILLED, reader, following, message)


def _reused(view: View) -> Iterator[Hazard]:
    """The forward leaves the buckets of `schedule.reused` in its slots; the backward reuses only
    these. Without a backward the same forward runs next and reuses what the previous run left."""
    promised = {(index, bucket.key) for index, bucket in view.schedule.reused}
    if view.name == "forward":
        left = {_slot(node).index: node for node in view.that(lambda op: op.slot is not None)}
        for index, bucket in view.schedule.reused:
            last = left.get(index)
            if last is None or ops.bucket_of(last).key != bucket.key:
                message = f"it does not leave bucket {bucket.label} in slot {index}"
                where = view.graph.output_node() if last is None else last
                yield view.hazard(HazardKind.NOT_REUSED, where, None, message)
        if view.schedule.backward is not None:
            promised = set()
    for node in view.that(_held):
        if (_slot(node).index, ops.bucket_of(node).key) not in promised:
            message = f"{label(node)} needs its bucket in a slot, where no forward leaves it"
            yield view.hazard(HazardKind.NOT_REUSED, node, None, message)


def _lifetimes(view: View) -> Iterator[Hazard]:
    """Memory is freed once, with the last of its names, and is not read after that."""
    frees: dict[fx.Node, fx.Node] = {}
    for node in view.that(lambda op: op.frees is not None):
        value: Any = node.args[0]
        if value in frees:
            message = f"{named(value)} is freed twice"
            yield view.hazard(HazardKind.WRONG_FREE, value, node, message)
        elif not owns(value) and (value.op != "placeholder" or token_of(value) is not None):
            message = f"{label(value)} owns no memory, yet it is freed"
            yield view.hazard(HazardKind.WRONG_FREE, value, node, message)
        else:
            frees[value] = node
    lasting = outliving(view.graph)
    for shared in sharing(view.graph).values():
        owners = [name for name in shared if owns(name) or name.op == "placeholder"]
        yield from _used_after_free(view, owners, frees)
        for name in owners:
            if name in lasting:
                if name in frees:
                    message = f"{named(name)} is freed, but it is returned"
                    yield view.hazard(HazardKind.WRONG_FREE, name, frees[name], message)
            elif (owns(name) or name in view.left) and name not in frees:
                message = f"{named(name)} is neither freed nor returned"
                yield view.hazard(HazardKind.LEAK, name, None, message)


def _used_after_free(
    view: View, shared: list[fx.Node], frees: dict[fx.Node, fx.Node]
) -> Iterator[Hazard]:
    for name in shared:
        for user in name.users:
            if name in frees and view.order.issued_before(frees[name], user):
                if ops.effects(user).frees is not None and user.args[0] is name:
                    continue  # a double free, reported elsewhere
                message = f"{label(user)} takes {named(name)}, which is freed before it"
                yield view.hazard(HazardKind.USE_AFTER_FREE, user, name, message)
    releases = [frees[name] for name in shared if name in frees]
    if not releases or len(releases) < len(shared):
        return
    release = max(releases, key=view.order.position.__getitem__)
    deferred = [free for free in releases if not ops.effects(free).waits]
    kept_for = {producer(n) for free in deferred for n in free.kwargs.get("after", ())}  # type: ignore[arg-type, union-attr]
    for name in shared:
        for user in name.users:
            if ops.stream_of(user) is Stream.COMPUTE or user in kept_for or name not in reads(user):
                continue
            if view.order.issued_before(user, release) and not view.order.before(user, release):
                message = (
                    f"{named(name)} is freed while {label(user)} may still read it: "
                    f"no edge orders {label(user)} before its free; add after=({label(user)}) to it"
                )
                yield view.hazard(HazardKind.FREED_TOO_EARLY, user, release, message)


def _assigns(view: View) -> Iterator[Hazard]:
    """The readers of a value's old version are before the op that changes it."""
    versions = sharing(view.graph)
    # a buffer has only one consumer by its declaration
    changing = view.that(lambda op: any(t.at == op.fills and t.kind is None for t in op.takes))
    for assign in changing:
        for old in versions[memory(assign)]:
            if view.order.issued_before(old, assign):
                yield from _read_before(view, old, assign)


def _read_before(view: View, old: fx.Node, assign: fx.Node) -> Iterator[Hazard]:
    """The readers of `old` are before `assign`, and the backward does not read it."""
    for reader in old.users:
        op = ops.effects(reader)
        if op.fills is not None or op.frees is not None or ops.op_of(reader) is None:
            continue
        if old in reads(reader) and not view.order.before(reader, assign):
            message = (
                f"{label(reader)} reads {old.name} as it was before {label(assign)} changes it, "
                f"but no edge orders {label(reader)} before it"
            )
            yield view.hazard(HazardKind.CHANGED_EARLY, reader, assign, message)
    if old.name in view.schedule.saved_values and view.name == "forward":
        message = f"the backward takes {old.name} as it was before {label(assign)} changes it"
        yield view.hazard(HazardKind.CHANGED_EARLY, old, assign, message)


CHECKS: tuple[Check, ...] = (_slots_fit, _slots_in_order, _reused, _lifetimes, _assigns)
