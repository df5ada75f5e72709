"""The part of `verify` that is about the cycle: a step's graphs, one after the other, and again.

What must hold of the parts of buckets that ops read and write, over all graphs:

- a read is after the last write before it;
- a write is after all earlier reads and writes;
- what a backward leaves is given back after the copies out of it.

[Note: cycle] The graphs of a schedule are joined at tokens (`megacompile.ir.tokens`), at what the
backward leaves for the update, and by the streams that are in order: they are the same for all
graphs. What comes first is the step of another schedule, which may write every part: an update of
each bucket, then gradients of it. Then come forward, backward, update, forward and backward; where
backwards add to gradients on the host, the first two come twice; where the backward updates, the
update is left out. Pairs of ops of one graph are for the checks of that graph.

A forward returns when its copies to the device are done: so parameters may be edited at once.

An update may have nothing to do for some buckets: another optimizer steps for them. Its ops on them
do nothing then, and wait for nothing. So in an update ops of two buckets do not order one another.
Threads make its copies to the host, in chunks: these are in no order with those of a backward.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import Handed, handed, stands_for
from megacompile.ir.lifetimes import sharing
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.tokens import Place, token_of, written
from megacompile.ir.values import bucket_of, label, memory, producer, reads
from megacompile.verify.hazard import Hazard, HazardKind, Step, View, walk


@dataclass(frozen=True, slots=True)
class Access:
    """An op that reads or writes a part of a bucket, in one run of its graph."""

    run: int  # 0: another schedule's step
    graph: str
    node: fx.Node | None  # None: of another schedule
    bit: int

    def races(self, run: int, before: int) -> bool:
        """True if it is of an earlier run, and not done when an op begins that is after these."""
        return self.run != run and not before & self.bit

    def named(self, reader: str) -> tuple[str, str]:
        """The name of the access in a message of graph `reader`, the first time and again."""
        if self.node is None:
            return "an earlier schedule", "that"
        name = label(self.node)
        again = name if name[0].isdigit() else "that"
        return (name if self.graph == reader else f"{name} of the {self.graph}"), again


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
        if not others:  # of what any schedule may do, and this one does, this one is told
            yield hazard


def _runs(views: Mapping[str, View]) -> list[str]:
    if "backward" not in views:
        return list(views)  # the rest of a step, too: its gradients are another schedule's
    once = ["forward", "backward"]
    adds = views["backward"].that(lambda op: Part.GRADIENTS in op.reads)
    step = ["update"] if "update" in views else []
    return [*once, *(once if adds and step else []), *step, *once]


@dataclass
class _Cycle:
    """The runs so far. What is done is a set of ops, as the bits of an integer."""

    schedule: Schedule
    runs: int = 0
    bits: Iterator[int] = field(default_factory=lambda: (1 << i for i in itertools.count()))
    streams: dict[Stream, int] = field(default_factory=dict)  # what is done at its next op
    handed: dict[Handed, int] = field(default_factory=dict)  # what is done when it is there
    writer: dict[Place, Access] = field(default_factory=dict)  # the last one
    readers: dict[Place, list[Access]] = field(default_factory=lambda: defaultdict(list))
    copies: dict[str, list[tuple[fx.Node, int]]] = field(default_factory=dict)  # of what is left
    drained: int = 0  # what was done when the host went on

    def __post_init__(self) -> None:
        for bucket in self.schedule.buckets:
            self._earlier(bucket)

    def _earlier(self, bucket: Bucket) -> None:
        """A step of another schedule, of which nothing is done yet."""
        plan = self.schedule.plan
        resident = bucket.key in plan.resident
        update, gradients = (Access(0, "", None, next(self.bits)) for _ in range(2))
        weights, states = (  # what is on a disk is written after the update
            Access(0, "", None, next(self.bits)) if bucket.key in keys else update
            for keys in (plan.weights_on_disk, plan.on_disk)
        )
        done = update.bit | (self.streams.get(Stream.COMPUTE, 0) if resident else 0)
        left = done | gradients.bit  # in whatever order
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
        """Go on with a graph."""
        self.runs += 1
        steps, apart = view.order.steps, {}
        if view.name == "update":
            steps, apart = list(map(_by_thread, steps)), _apart(view)
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
        if view.name == "forward":  # whose saved values are for other checks
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
            for other, does in earlier:
                if other.races(self.runs, before):
                    yield self._written_too_early(view, node, bucket, part, other, does)
                    break
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
        other, again = writer.named(view.name)
        message = (
            f"{label(node)} reads the {part.value} of bucket {bucket.label}, which {other} may "
            f"still write: no edge orders {again} before it; {fix}"
        )
        return view.hazard(HazardKind.READ_TOO_EARLY, node, writer.node, message)

    def _written_too_early(
        self, view: View, node: fx.Node, bucket: Bucket, part: Part, earlier: Access, does: str
    ) -> Hazard:
        other, again = earlier.named(view.name)
        message = (
            f"{label(node)} writes the {part.value} of bucket {bucket.label}, which {other} may "
            f"still {does}: no edge orders {again} before it; let {label(node)} wait for a "
            "token, or an op, that comes behind it"
        )
        return view.hazard(HazardKind.WRITTEN_TOO_EARLY, node, earlier.node, message)

    # What a backward leaves.

    def _lifetimes(
        self, view: View, before: Mapping[fx.Node, int], done: Mapping[fx.Node, int]
    ) -> Iterator[Hazard]:
        """Memory that the backward left goes after the copies out of it."""
        frees = {node.args[0]: node for node in view.that(lambda op: op.frees is not None)}
        for root, shared in sharing(view.graph).items():
            copies = self.copies.get(root.name, []) if root in view.left else []
            releases = [frees[name] for name in shared if name in frees]
            if not copies or len(releases) < len(shared):
                continue  # what is not freed is reported as such
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
                        f"it: no edge orders {label(copy)} before its free; add after=({token}) to "
                        "it"
                    )
                    yield view.hazard(HazardKind.FREED_TOO_EARLY, copy, releases[-1], message)


def _copies_of_left(
    view: View, bits: Mapping[fx.Node, int]
) -> dict[str, list[tuple[fx.Node, int]]]:
    """The copies out of the memory of what a backward leaves, by its name."""
    roots = {memory(value): value.name for value in ops.returned(view.graph)[1]}
    found: dict[str, list[tuple[fx.Node, int]]] = defaultdict(list)
    for node in view.graph.nodes if roots else ():
        name = roots.get(memory(node))
        if name is not None:
            found[name] += [(u, bits[u]) for u in node.users if u in bits and node in reads(u)]
    return dict(found)


def _apart(view: View) -> dict[fx.Node, int]:
    """The ops of an update, by the bucket that they are of."""
    found: dict[fx.Node, int] = {}
    for node, _ in view.order.calls:
        subject: object = node.args[0] if node.args else None
        if isinstance(subject, fx.Node):
            subject = bucket_of(view.source(memory(subject)))
        if isinstance(subject, Bucket):
            found[node] = subject.key
    return found


def _by_thread(step: Step) -> Step:
    """A step of an update: threads make its copies to the host, in no order."""
    return replace(step, stream=None) if step.stream is Stream.D2H else step


def _token(bucket: Bucket, part: Part) -> str:
    """The name of a placeholder for a part."""
    return f"{part.value}_{bucket.label}"
