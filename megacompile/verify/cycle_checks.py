"""Checks across the graphs of a step, which run in a cycle.

What must hold for the parts of buckets that ops read and write, across all graphs:

- a read waits for the last write before it;
- a write waits for all earlier reads and writes;
- memory that a backward leaves is freed after the copies out of it.

[Note: cycle] The graphs of a schedule are ordered by tokens (`megacompile.ir.edges`), by the
values that the backward leaves for the update, and by the in-order streams, which all graphs share.
The cycle starts after a step of another schedule, which may have written every part: an update of
each bucket, then its gradients. Then run forward, backward, update, forward and backward. If
backwards add to gradients on the host, the first two run twice; if the backward updates, there is
no update graph. Pairs of ops within one graph are checked with that graph.

A forward returns when its copies to the device are done, so that parameters may be edited at once.

An update may skip some buckets because another optimizer steps for them. Its ops on these do
nothing and wait for nothing, so in an update, ops on different buckets do not order one another.
Threads make its copies to the host in chunks, unordered with the copies of a backward.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import Handed, Place, handed, stands_for, token_of, written
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.values import bucket_of, label, memory, producer, reads, sharing
from megacompile.verify.hazard import Hazard, HazardKind, View, walk


@dataclass(frozen=True, slots=True)
class Access:
    """A read or write of a part of a bucket, in one run of its graph."""

    run: int  # 0: another schedule's step
    graph: str
    node: fx.Node | None  # None: another schedule's
    bit: int

    def races(self, run: int, before: int) -> bool:
        """True if this access belongs to an earlier run and is not among the ops done in
        `before`."""
        return self.run != run and not before & self.bit

    def named(self, reader: str) -> str:
        """The name of this access in a message of graph `reader`."""
        if self.node is None:
            return "an earlier schedule"
        name = label(self.node)
        return name if self.graph == reader else f"{name} of the {self.graph}"


def hazards(views: list[View]) -> Iterator[Hazard]:
    """Hazards between graphs."""
    cycle = _Cycle(views[0].schedule)
    by_name = {view.name: view for view in views}
    found: dict[tuple[object, ...], Hazard] = {}
    for name in _runs(by_name):
        for hazard in cycle.run(by_name[name]):
            key = hazard.kind, *hazard.nodes
            found.setdefault(key, hazard)
    for key, hazard in found.items():
        others = [other for other in found if len(other) > len(key) and other[: len(key)] == key]
        if not others:  # a race with this schedule's op replaces the same race with any schedule
            yield hazard


def _runs(views: Mapping[str, View]) -> list[str]:
    if "backward" not in views:
        return list(views)  # also for the rest of a step, whose gradients are another schedule's
    once = ["forward", "backward"]
    adds = views["backward"].that(lambda op: Part.GRADIENTS in op.reads)
    step = ["update"] if "update" in views else []
    return [*once, *(once if adds and step else []), *step, *once]


@dataclass
class _Cycle:
    """The runs so far. A set of finished ops is the bits of an integer."""

    schedule: Schedule
    runs: int = 0
    bits: Iterator[int] = field(default_factory=lambda: (1 << i for i in itertools.count()))
    streams: dict[Stream, int] = field(default_factory=dict)  # done before its next op
    handed: dict[Handed, int] = field(default_factory=dict)  # done when it is available
    writer: dict[Place, Access] = field(default_factory=dict)  # the last
    readers: dict[Place, list[Access]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[str, list[tuple[fx.Node, int]]] = field(default_factory=dict)  # out of left values
    drained: int = 0  # done when the host continued

    def __post_init__(self) -> None:
        for bucket in self.schedule.buckets:
            self._earlier(bucket)

    def _earlier(self, bucket: Bucket) -> None:
        """A step of another schedule that may still be running."""
        plan = self.schedule.plan
        resident = bucket.key in plan.resident
        update, gradients = (Access(0, "", None, next(self.bits)) for _ in range(2))
        weights, states = (  # parts on a disk are written after the update
            Access(0, "", None, next(self.bits)) if bucket.key in keys else update
            for keys in (plan.weights_on_disk, plan.on_disk)
        )
        done = update.bit | (self.streams.get(Stream.COMPUTE, 0) if resident else 0)
        left = done | gradients.bit  # in any order
        stream = Stream.COMPUTE if resident else Stream.D2H
        self.streams[stream] = self.streams.get(stream, 0) | left
        for part, wrote, there in (
            (Part.GRADIENTS, gradients, left),
            (Part.STATES, states, done),
            (Part.WEIGHTS, weights, done),
        ):
            self.handed[bucket.key, part] = there | wrote.bit
            self.writer[bucket.key, part] = wrote

    def run(self, view: View) -> Iterator[Hazard]:
        """Run a graph next, and yield its hazards."""
        self.runs += 1
        steps, apart = view.order.steps, {}
        if view.name == "update":
            # threads make its copies to the host, so these are unordered
            steps = [replace(s, stream=None) if s.stream is Stream.D2H else s for s in steps]
            apart = _apart(view)
        accesses = {node: op.reads or op.writes for node, op in view.order.calls}
        copies = (Stream.H2D, Stream.D2H)
        bits = {
            node: next(self.bits)
            for node, touches in accesses.items()
            if touches or ops.stream_of(node) in copies
        }
        placeholders = view.graph.find_nodes(op="placeholder")
        given = {n: self.handed.get(stands_for(self.schedule, n), 0) for n in placeholders}
        before, done = walk(steps, bits, self.streams, given=given, base=self.drained, apart=apart)
        for node, touches in accesses.items():
            if touches:
                yield from self._accesses(view, node, bits[node], before[node])
        if view.name == "forward":  # other checks cover its saved values
            self.drained |= self.streams.get(Stream.H2D, 0)
            return
        if view.name == "update":
            yield from self._lifetimes(view, before, done)
        made = handed(self.schedule, view.name)
        self.handed |= {what: done[node] for what, node in made.items()}
        if view.name == "backward":
            self.copies = _copies_of_left(view, bits)

    # Parts of buckets.

    def _accesses(self, view: View, node: fx.Node, bit: int, before: int) -> Iterator[Hazard]:
        op, bucket = ops.effects(node), ops.bucket_of(node)
        access = Access(self.runs, view.name, node, bit)
        for part in op.reads:
            writer = self.writer.get((bucket.key, part))
            if writer is not None and writer.races(self.runs, before):
                yield self._read_too_early(view, node, bucket, part, writer)
        for part in op.writes:
            place = bucket.key, part
            earlier = [
                *((reader, "read") for reader in self.readers[place]),
                *((writer, "write") for writer in [self.writer.get(place)] if writer is not None),
            ]
            race = next((each for each in earlier if each[0].races(self.runs, before)), None)
            if race is not None:
                other, does = race
                message = (
                    f"{label(node)} writes the {part.value} of bucket {bucket.label}, which "
                    f"{other.named(view.name)} may still {does}: no edge orders that before it; "
                    f"let {label(node)} wait for a token, or an op, that comes after it"
                )
                yield view.hazard(HazardKind.WRITTEN_TOO_EARLY, node, other.node, message)
        for part in op.reads:
            self.readers[bucket.key, part].append(access)
        for part in op.writes:
            self.writer[bucket.key, part] = access
            self.readers[bucket.key, part] = []

    def _read_too_early(
        self, view: View, node: fx.Node, bucket: Bucket, part: Part, writer: Access
    ) -> Hazard:
        tokens = filter(None, map(token_of, node.all_input_nodes))
        fix = f"add after=({_token(bucket, part)}) to it"
        if (bucket.key, part) in {each.place for each in tokens}:
            fix = f"let the {writer.graph or 'earlier schedule'} return it"
        message = (
            f"{label(node)} reads the {part.value} of bucket {bucket.label}, which "
            f"{writer.named(view.name)} may still write: no edge orders that before it; {fix}"
        )
        return view.hazard(HazardKind.READ_TOO_EARLY, node, writer.node, message)

    # Values that a backward leaves.

    def _lifetimes(
        self, view: View, before: Mapping[fx.Node, int], done: Mapping[fx.Node, int]
    ) -> Iterator[Hazard]:
        """Memory that the backward left is freed after the copies out of it."""
        frees = {node.args[0]: node for node in view.that(lambda op: op.frees is not None)}
        for root, shared in sharing(view.graph).items():
            copies = self.copies.get(root.name, []) if root in view.left else []
            releases = [frees[name] for name in shared if name in frees]
            if not copies or len(releases) < len(shared):
                continue  # a leak is reported elsewhere
            gone = 0
            for release in releases:
                gone |= before[release]
                for waits in release.kwargs.get("after", ()):  # type: ignore[union-attr]
                    gone |= done[producer(waits)]  # type: ignore[arg-type]
            for copy, bit in copies:
                if not gone & bit:
                    token = ", ".join(_token(ops.bucket_of(copy), p) for _, p in written(copy))
                    message = (
                        f"{root.name} is freed while {label(copy)} of the backward may still read "
                        f"it: no edge orders that before its free; add after=({token}) to it"
                    )
                    yield view.hazard(HazardKind.FREED_TOO_EARLY, copy, releases[-1], message)


def _copies_of_left(
    view: View, bits: Mapping[fx.Node, int]
) -> dict[str, list[tuple[fx.Node, int]]]:
    """The copies out of the memory of each value that a backward leaves, by its name."""
    roots = {memory(value): value.name for value in ops.returned(view.graph)[1]}
    found: dict[str, list[tuple[fx.Node, int]]] = defaultdict(list)
    for node in view.graph.nodes if roots else ():
        name = roots.get(memory(node))
        if name is not None:
            found[name] += [(u, bits[u]) for u in node.users if u in bits and node in reads(u)]
    return dict(found)


def _apart(view: View) -> dict[fx.Node, int]:
    """The bucket key of each op of an update."""
    found: dict[fx.Node, int] = {}
    for node, _ in view.order.calls:
        subject: object = node.args[0] if node.args else None
        if isinstance(subject, fx.Node):
            subject = bucket_of(view.source(memory(subject)))
        if isinstance(subject, Bucket):
            found[node] = subject.key
    return found


def _token(bucket: Bucket, part: Part) -> str:
    """Placeholder name of the token for a part."""
    return f"{part.value}_{bucket.label}"
