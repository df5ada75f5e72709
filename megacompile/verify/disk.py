"""The part of `verify` that is about what is on a disk: states, and parameters.

What must hold:

- states and parameters on a disk are used after a read of the same graph;
- a prefetch names a read of its own, in whose buffer it finds its bucket, and each read has one;
- new ones are written after the op that makes them;
- nothing else is read or written there.

That a read is after the last write, and a write after the reads before it, is shown where all
parts of buckets are: within a graph in `megacompile.verify.gradients`, around the cycle of a step
in `megacompile.verify.cycle`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Part, effects
from megacompile.ir.stream import Stream
from megacompile.ir.values import label
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def _states(view: View) -> Iterator[Hazard]:
    """States that are on a disk are used between a read and a write of them, and no others are."""
    on_disk = view.schedule.plan.on_disk
    touching = view.that(lambda op: Part.STATES in (*op.reads, *op.writes))
    reads_of: dict[int, list[fx.Node]] = defaultdict(list)
    writes_of: dict[int, list[fx.Node]] = defaultdict(list)
    for node in touching:
        key = ops.bucket_of(node).key
        if effects(node).stored is None:
            continue
        (reads_of if ops.stream_of(node) is Stream.READ else writes_of)[key].append(node)
        if key not in on_disk:
            message = f"{label(node)} is of a bucket whose states lie on the host; drop it"
            yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
    for node in touching:
        bucket = ops.bucket_of(node)
        if bucket.key not in on_disk or ops.stream_of(node) is Stream.READ:
            continue
        if not any(view.order.before(read, node) for read in reads_of[bucket.key]):
            message = (
                f"{label(node)} uses the states of bucket {bucket.label}, which lie on a disk, and "
                f"no edge orders {bucket.label}READ_STATE before it; add after=(rs{bucket.suffix},)"
            )
            yield view.hazard(HazardKind.NOT_READ, node, None, message)
        if ops.stream_of(node) is Stream.WRITE or Part.STATES not in effects(node).writes:
            continue
        if not any(view.order.before(node, write) for write in writes_of[bucket.key]):
            message = (
                f"{label(node)} makes new states of bucket {bucket.label}, which lie on a disk, "
                f"and no {bucket.label}WRITE_STATE comes behind it; write them"
            )
            yield view.hazard(HazardKind.NOT_WRITTEN, node, None, message)


def _weights(view: View) -> Iterator[Hazard]:
    """Parameters on a disk are read for each prefetch and update, and written after an update."""
    keys = view.schedule.plan.weights_on_disk
    touching = view.that(lambda op: Part.WEIGHTS in (*op.reads, *op.writes))
    stored = [node for node in touching if effects(node).stored is not None]
    yield from _elsewhere(view, stored, keys)
    reads = [node for node in stored if ops.stream_of(node) is Stream.READ]
    writes = [node for node in stored if ops.stream_of(node) is Stream.WRITE]
    taken: dict[fx.Node, fx.Node] = {}
    for node in touching:
        op, bucket = effects(node), ops.bucket_of(node)
        if bucket.key not in keys or op.stored is not None:
            continue
        if Part.WEIGHTS in op.reads:
            yield from _read_before(view, node, reads, taken)
        if Part.WEIGHTS in op.writes and not any(
            ops.bucket_of(write).key == bucket.key and view.order.before(node, write)
            for write in writes
        ):
            message = (
                f"{label(node)} makes new parameters of bucket {bucket.label}, which lie on a "
                f"disk, and no {bucket.label}WRITE_WEIGHTS comes behind it; write them"
            )
            yield view.hazard(HazardKind.NOT_WRITTEN, node, None, message)
    for read in reads:
        if read not in taken:
            message = (
                f"{label(read)} takes a buffer, and nobody gives that back, because no prefetch or "
                "update names it; drop it, or name it"
            )
            yield view.hazard(HazardKind.LEAK, read, None, message)


def _elsewhere(view: View, stored: list[fx.Node], keys: Collection[int]) -> Iterator[Hazard]:
    for node in stored:
        if ops.bucket_of(node).key not in keys:
            message = f"{label(node)} is of a bucket whose parameters lie elsewhere; drop it"
            yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
    written: set[int] = set()
    for node in stored:
        if ops.stream_of(node) is not Stream.WRITE:
            continue
        if ops.bucket_of(node).key in written:
            message = f"{label(node)} comes twice, and there is one buffer; drop one of them"
            yield view.hazard(HazardKind.WRONG_UPDATE, node, None, message)
        written.add(ops.bucket_of(node).key)


def _read_before(
    view: View, node: fx.Node, reads: list[fx.Node], taken: dict[fx.Node, fx.Node]
) -> Iterator[Hazard]:
    """A prefetch or an update names a read of its bucket, which no other op has named."""
    bucket, fetches = ops.bucket_of(node), effects(node).fills_slot
    wanted = ops.read_weights if fetches else ops.read_trained
    named = [
        read
        for read in node.all_input_nodes
        if read in reads and read.target is wanted and ops.bucket_of(read).key == bucket.key
    ]
    for read in named:
        if read in taken:
            message = (
                f"{label(node)} takes the buffer of {read.name}, which {label(taken[read])} has "
                "given back; read again"
            )
            yield view.hazard(HazardKind.NOT_READ, node, taken[read], message)
        taken[read] = node
    if len(named) != 1:
        message = (
            f"{label(node)} reads the parameters of bucket {bucket.label}, which lie on a disk, "
            f"and names {len(named)} of its reads; name one {bucket.label}{wanted.__name__.upper()}"
        )
        yield view.hazard(HazardKind.NOT_READ, node, None, message)


CHECKS: tuple[Check, ...] = (_states, _weights)
