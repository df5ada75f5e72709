"""Checks of accesses to parts of buckets, in a graph and across the graphs of a step, which run in
a cycle.

A read waits for the last write before it, and a write for all earlier reads and writes. Gradients
on the host are read, to be added to, before they are written again. In one graph, weights and
states are read before they change.

[Note: cycle] The graphs of a schedule are ordered by tokens (`megacompile.ir.edges`), by the
values that the backward leaves for the update, and by the in-order streams, which all graphs share.
The cycle starts after a step of another schedule, which may have written every part: an update of
each bucket, then its gradients. Then run forward, backward, update, forward and backward. If
backwards add to gradients on the host, the first two run twice; if the backward updates, there is
no update graph.

A forward returns when its copies to the device are done, so that parameters may be edited at once.

An update may skip some buckets because another optimizer steps for them. Its ops on these do
nothing and wait for nothing, so in an update, ops on different buckets do not order one another.
Threads make its copies to the host in chunks, unordered with the copies of a backward.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import Handed, Place, handed, stands_for, written
from megacompile.ir.ops import Part, effects
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

    @property
    def updates(self) -> bool:
        return self.node is not None and effects(self.node).is_update

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
        if not others:  # a race with an op of this schedule replaces the same race with another's
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
    drained: int = 0  # done when the last forward returned

    def __post_init__(self) -> None:
        for bucket in self.schedule.buckets:
            self._earlier(bucket)

    def _earlier(self, bucket: Bucket) -> None:
        """Record a step of another schedule, which may still run, on a bucket."""
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
        accesses = {node: _accessed(node) for node, _ in view.order.calls}
        copies = (Stream.H2D, Stream.D2H)
        bits = {
            node: next(self.bits)
            for node, touches in accesses.items()
            if any(touches) or ops.stream_of(node) in copies
        }
        placeholders = view.graph.find_nodes(op="placeholder")
        given = {n: self.handed.get(stands_for(self.schedule, n), 0) for n in placeholders}
        before, done = walk(steps, bits, self.streams, given=given, base=self.drained, apart=apart)
        for node, touches in accesses.items():
            if any(touches):
                access = Access(self.runs, view.name, node, bits[node])
                yield from self._accesses(view, access, *touches, before[node])
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

    def _accesses(
        self,
        view: View,
        access: Access,
        reads: Sequence[Place],
        writes: Sequence[Place],
        before: int,
    ) -> Iterator[Hazard]:
        node = access.node
        assert node is not None
        for place in reads:
            writer, part = self.writer.get(place), place[1]
            if writer is None:
                continue
            other = writer.named(view.name)
            what = f"{label(node)} reads {part.value} that {other}"
            if not before & writer.bit:
                message = f"{what} may still write: no edge orders that before it; let it wait"
                yield view.hazard(HazardKind.RACE, node, writer.node, message)
            elif writer.run == self.runs and part is not Part.GRADIENTS:
                if not (writer.updates and access.updates):  # reported elsewhere
                    yield view.hazard(
                        HazardKind.CHANGED_EARLY, node, writer.node, f"{what} has changed"
                    )
        for place in writes:
            writer, readers = self.writer.get(place), self.readers[place]
            earlier = [*readers, *([] if writer is None else [writer])]
            what = f"{label(node)} writes {place[1].value} that"
            race = next((each for each in earlier if not before & each.bit), None)
            if race is not None:
                does = "write" if race is writer else "read"
                message = (
                    f"{what} {race.named(view.name)} may still {does}: no edge orders that before "
                    f"it; let it wait for a token, or an op, after that"
                )
                yield view.hazard(HazardKind.RACE, node, race.node, message)
            elif place[1] is Part.GRADIENTS and writer is not None and not readers:
                if writer.run == self.runs:
                    message = f"{what} {writer.named(view.name)} wrote, and no op has read"
                    yield view.hazard(HazardKind.LOST, node, writer.node, message)
        for place in reads:
            self.readers[place].append(access)
        for place in writes:
            self.writer[place] = access
            self.readers[place] = []

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
                    bucket = ops.bucket_of(copy)
                    token = ", ".join(f"{p.value}_{bucket.label}" for _, p in written(copy))
                    message = (
                        f"{root.name} is freed while {label(copy)} of the backward may still read "
                        f"it: no edge orders that before its free; add after=({token}) to it"
                    )
                    yield view.hazard(HazardKind.FREED_TOO_EARLY, copy, releases[-1], message)


def _accessed(node: fx.Node) -> tuple[list[Place], list[Place]]:
    """The parts of buckets that an op reads, also in place on the device, and that it writes."""
    op, subject = effects(node), node.args[0] if node.args else None
    found = [(subject.key, part) for part in op.reads] if isinstance(subject, Bucket) else []
    for value in reads(node):
        if (lent := effects(value).lends) is not None:
            found.append((ops.bucket_of(value).key, lent))
    return found, written(node)


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
