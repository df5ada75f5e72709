"""Checks of values that wait on the host or on a disk.

Between a forward and its backward:

- the result of every `offload_saved` of a forward, or of its write to a disk, is returned, and a
  `fetch_saved` brings back one of these. A returned value carries the event of its copy, so that
  the fetch waits for it in any graph;
- only the fetch reads the copy on the host, and only `read_saved` the copy on a disk;
- a staging buffer for the disk is returned once, and no more are in use than exist.

`megacompile.verify.memory_checks` checks that a value is freed after its offload and the copy on
the host after its fetch. `megacompile.verify.argument_checks` looks through the fetch and checks
that each stage gets its own values.

For states and parameters on a disk:

- they are used after a read in the same graph;
- each prefetch names its own read, whose buffer holds its bucket, and each read has one prefetch;
- new values are written after the op that makes them;
- nothing else is read or written there.

The order of reads and writes is checked for all parts of buckets: within a graph in
`megacompile.verify.bucket_checks`, across graphs in `megacompile.verify.cycle_checks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Part, Value, effects
from megacompile.ir.signature import elsewhere
from megacompile.ir.stream import Stream
from megacompile.ir.values import fetched_from, label, named, reads, taken
from megacompile.verify.hazard import Check, Hazard, HazardKind, View

# Saved tensors.


def _offloads_returned(view: View) -> Iterator[Hazard]:
    """Every copy to the host or to a disk is returned to the backward."""
    returned = set(view.graph.output_node().all_input_nodes)
    for node in view.that(lambda op: op.to_backward):
        if node not in returned and not _written(node):
            message = (
                f"{label(node)} moves {node.all_input_nodes[0].name} where no backward finds it"
            )
            yield view.hazard(HazardKind.OFFLOAD_LOST, node, None, message)


def _fetches_match(view: View) -> Iterator[Hazard]:
    """Every fetched value is one that the forward offloaded, to the host or to a disk."""
    for node in view.that(lambda op: op.gives is Value.SAVED):
        if fetched_from(view.copies, node) is node:
            message = (
                f"{label(node)} takes {named(node.all_input_nodes[0])}, which waits for no copy"
            )
            yield view.hazard(HazardKind.NOT_OFFLOADED, node, None, message)


def _read_on_the_device(view: View) -> Iterator[Hazard]:
    """Ops other than fetches take values in device memory."""
    names = elsewhere(view.schedule.forward)
    copies = (Value.SAVED_ON_HOST, Value.SAVED_ON_DISK)
    for node in view.that(lambda op: op.frees is None):
        allowed = [taken(node, kind) for kind in copies]
        for value in reads(node):
            is_copy = value.name in names if value.op == "placeholder" else False
            if value not in allowed and (is_copy or effects(value).gives in copies):
                message = f"{label(node)} takes {value.name}, a copy on the host or on a disk"
                yield view.hazard(HazardKind.ON_HOST, node, value, message)


def _buffers(view: View) -> Iterator[Hazard]:
    """Staging buffers of the disk are each returned once, and there are enough."""
    lent: list[fx.Node] = []  # the ops that return the buffers
    sets = view.schedule.plan.saved_sets
    for node in view.that(lambda op: op.gives is Value.SAVED_ON_HOST):
        if taken(node, Value.SAVED_ON_DISK) is None and not _written(node):
            continue  # it waits on the host
        users = [user for user in node.users if node in reads(user)]
        if len(users) != 1:
            others = ", ".join(map(label, users)) or "no op"
            message = f"{label(node)} takes a buffer that {others} return; pass it to one op"
            yield view.hazard(HazardKind.WRONG_BUFFER, node, None, message)
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


def _written(copy: fx.Node) -> bool:
    """True if a copy goes on to a disk."""
    writes = (user for user in copy.users if effects(user).gives is Value.SAVED_ON_DISK)
    return any(taken(write, Value.SAVED_ON_HOST) is copy for write in writes)


# States and parameters on a disk.


def _on_disk(view: View) -> Iterator[Hazard]:
    """Parts of buckets on a disk are used after a read and written after a change; no other parts
    are read or written there."""
    plan = view.schedule.plan
    for part, keys in ((Part.STATES, plan.on_disk), (Part.WEIGHTS, plan.weights_on_disk)):
        touching = view.that(lambda op, part=part: part in (*op.reads, *op.writes))  # type: ignore[misc]
        stored = [node for node in touching if effects(node).stored is not None]
        reads = [node for node in stored if ops.stream_of(node) is Stream.READ]
        writes = [node for node in stored if ops.stream_of(node) is Stream.WRITE]
        for node in stored:
            if ops.bucket_of(node).key not in keys:
                message = (
                    f"{label(node)} touches a bucket whose {part.value} are elsewhere; drop it"
                )
                yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
        of_disk = [node for node in touching if ops.bucket_of(node).key in keys]
        for node in of_disk:
            makes = part in effects(node).writes and node not in stored
            if makes and not any(view.order.before(node, write) for write in _of(node, writes)):
                message = f"{label(node)} makes new {part.value}, which no op writes to the disk"
                yield view.hazard(HazardKind.NOT_WRITTEN, node, None, message)
            if part is Part.STATES and node not in reads:
                if not any(view.order.before(read, node) for read in _of(node, reads)):
                    message = f"{label(node)} uses states on a disk, but no read is before it"
                    yield view.hazard(HazardKind.NOT_READ, node, None, message)
        if part is Part.WEIGHTS:
            users = [n for n in of_disk if n not in stored and part in effects(n).reads]
            yield from _weights_read(view, users, reads)
            for k, node in enumerate(writes):
                if _of(node, writes[:k]):
                    message = f"{label(node)} runs twice, but there is one buffer"
                    yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)


def _of(node: fx.Node, others: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes among `others` with the same bucket."""
    key = ops.bucket_of(node).key
    return [other for other in others if ops.bucket_of(other).key == key]


def _weights_read(
    view: View, users: Sequence[fx.Node], reads: Sequence[fx.Node]
) -> Iterator[Hazard]:
    """A prefetch or an update names its own read of its bucket."""
    taken: dict[fx.Node, fx.Node] = {}
    for node in users:
        wanted = ops.read_weights if effects(node).fills_slot else ops.read_trained
        own = [n for n in _of(node, reads) if n.target is wanted and n in node.all_input_nodes]
        for read in own:
            if read in taken:
                message = f"{label(node)} takes the buffer that {label(taken[read])} has returned"
                yield view.hazard(HazardKind.NOT_READ, node, taken[read], message)
            taken[read] = node
        if len(own) != 1:
            message = f"{label(node)} reads parameters on a disk, but names {len(own)} reads"
            yield view.hazard(HazardKind.NOT_READ, node, None, message)
    for read in reads:
        if read not in taken:
            message = f"{label(read)} takes a buffer that is never returned; name or drop it"
            yield view.hazard(HazardKind.LEAK, read, None, message)


CHECKS: tuple[Check, ...] = (
    _offloads_returned,
    _fetches_match,
    _read_on_the_device,
    _buffers,
    _on_disk,
)
