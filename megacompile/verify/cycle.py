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

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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
from megacompile.verify.hazard import Hazard, HazardKind, Step, View


@dataclass(frozen=True, slots=True)
class Access:
    """An op that reads or writes a part of a bucket, in one run of its graph."""

    run: int  # 0: another schedule's step
    graph: str
    node: fx.Node | None  # None: of another schedule
    bit: int

    def named(self, reader: str) -> str:
        """The name of the access in a message of graph `reader`."""
        if self.node is None:
            return "an earlier schedule"
        where = "" if self.graph == reader else f" of the {self.graph}"
        return f"{label(self.node)}{where}"


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
    """The runs so far. Each op has the set of the ops before it, as the bits of an integer."""

    schedule: Schedule
    bits: int = 0
    runs: int = 0
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
        resident = bucket.key in self.schedule.plan.resident
        before = self.streams.get(Stream.COMPUTE, 0) if resident else 0
        update, gradients = (Access(0, "", None, self._bit()) for _ in range(2))
        plan = self.schedule.plan  # what is on a disk is written after the update
        weights, states = (
            Access(0, "", None, self._bit()) if bucket.key in keys else update
            for keys in (plan.weights_on_disk, plan.on_disk)
        )
        done = before | 1 << update.bit
        left = done | 1 << gradients.bit  # in whatever order
        stream = Stream.COMPUTE if resident else Stream.D2H
        self.streams[stream] = self.streams.get(stream, 0) | left
        for part in Part:
            wrote = {Part.GRADIENTS: gradients, Part.STATES: states, Part.WEIGHTS: weights}[part]
            there = left if part is Part.GRADIENTS else done
            self.handed[bucket.key, part] = there | 1 << wrote.bit
            self.writer[bucket.key, part] = wrote

    def _bit(self) -> int:
        self.bits += 1
        return self.bits - 1

    def run(self, view: View) -> Iterator[Hazard]:
        """Go on with a graph."""
        self.runs += 1
        before: dict[fx.Node, int] = {}
        done: dict[fx.Node, int] = {}
        bits: dict[fx.Node, int] = {}
        apart = _apart(view) if view.name == "update" else {}
        streams: defaultdict[int | None, dict[Stream, int]] = defaultdict(
            self.streams.copy if apart else lambda: self.streams
        )
        for step in view.order.steps:
            node, op = step.node, ops.effects(step.node)
            if node.op == "placeholder":
                done[node] = self.handed.get(stands_for(self.schedule, node), 0)
                continue
            of, stream = streams[apart.get(node)], _stream(view, step)
            earlier = before[node] = self.drained | _before(step, stream, done, of, apart)
            touches = op.reads or op.writes
            if touches or op.stream in (Stream.H2D, Stream.D2H):
                bits[node] = self._bit()
                done[node] = earlier | 1 << bits[node]
            else:
                done[node] = earlier
            if stream is not None:
                of[stream] = done[node]
            if touches:
                access = Access(self.runs, view.name, node, bits[node])
                yield from self._accesses(view, access, earlier)
        for of in streams.values():
            for stream, so_far in of.items():
                self.streams[stream] = self.streams.get(stream, 0) | so_far
        if view.name == "forward":
            self.drained |= self.streams.get(Stream.H2D, 0)
        yield from self._lifetimes(view, before, done)
        if view.name != "forward":  # whose saved values are for other checks
            made = handed(self.schedule, view.name)
            self.handed |= {what: done[node] for what, node in made.items()}
        if view.name == "backward":
            self._note_copies(view, bits)

    # Parts of buckets.

    def _accesses(self, view: View, access: Access, before: int) -> Iterator[Hazard]:
        node = access.node
        assert node is not None
        op, bucket = ops.effects(node), ops.bucket_of(node)
        for part in op.reads:
            writer = self.writer.get((bucket.key, part))
            if writer is not None and _races(writer, access, before):
                yield self._read_too_early(view, access, bucket, part, writer)
        for part in op.writes:
            place = bucket.key, part
            for earlier, does in [
                *((reader, "read") for reader in self.readers[place]),
                *((writer, "write") for writer in [self.writer.get(place)] if writer is not None),
            ]:
                if _races(earlier, access, before):
                    yield self._written_too_early(view, access, bucket, part, earlier, does)
                    break
        for part in op.reads:
            self.readers[bucket.key, part].append(access)
        for part in op.writes:
            self.writer[bucket.key, part] = access
            self.readers[bucket.key, part] = []

    def _read_too_early(
        self, view: View, access: Access, bucket: Bucket, part: Part, writer: Access
    ) -> Hazard:
        node = access.node
        assert node is not None
        tokens = filter(None, map(token_of, node.all_input_nodes))
        fix = f"add after=({_token(bucket, part)}) to it"
        if (bucket.key, part) in {each.place for each in tokens}:
            fix = f"let the {writer.graph or 'earlier schedule'} return it"
        other = writer.named(view.name)
        message = (
            f"{label(node)} reads the {part.value} of bucket {bucket.label}, which {other} may "
            f"still write: no edge orders {_end(other)} before it; {fix}"
        )
        return view.hazard(HazardKind.READ_TOO_EARLY, node, writer.node, message)

    def _written_too_early(
        self, view: View, access: Access, bucket: Bucket, part: Part, earlier: Access, does: str
    ) -> Hazard:
        node, other = access.node, earlier.named(view.name)
        assert node is not None
        message = (
            f"{label(node)} writes the {part.value} of bucket {bucket.label}, which {other} may "
            f"still {does}: no edge orders {_end(other)} before it; let {label(node)} wait for a "
            "token, or an op, that comes behind it"
        )
        return view.hazard(HazardKind.WRITTEN_TOO_EARLY, node, earlier.node, message)

    # What a backward leaves.

    def _note_copies(self, view: View, bits: Mapping[fx.Node, int]) -> None:
        self.copies = {}
        roots = {memory(value): value.name for value in ops.returned(view.graph)[1]}
        for node in view.graph.nodes:
            name = roots.get(memory(node))
            users = node.users if name is not None else ()
            found = [(u, bits[u]) for u in users if u in bits and node in reads(u)]
            if name is not None and found:
                self.copies.setdefault(name, []).extend(found)

    def _lifetimes(
        self, view: View, before: Mapping[fx.Node, int], done: Mapping[fx.Node, int]
    ) -> Iterator[Hazard]:
        """Memory that the backward left goes after the copies out of it."""
        if view.name != "update" or not self.copies:
            return
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
                if not gone >> bit & 1:
                    token = ", ".join(_token(ops.bucket_of(copy), p) for _, p in written(copy))
                    message = (
                        f"{root.name} is freed while {label(copy)} of the backward may still read "
                        f"it: no edge orders {label(copy)} before its free; add after=({token}) to "
                        "it"
                    )
                    yield view.hazard(HazardKind.FREED_TOO_EARLY, copy, releases[-1], message)


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


def _stream(view: View, step: Step) -> Stream | None:
    """The stream whose ops are in order, those of earlier graphs too; None: it is of none."""
    by_thread = view.name == "update" and step.stream is Stream.D2H
    return None if by_thread else step.stream


def _before(
    step: Step,
    stream: Stream | None,
    done: Mapping[fx.Node, int],
    streams: Mapping[Stream, int],
    apart: Mapping[fx.Node, int],
) -> int:
    before = 0 if stream is None else streams.get(stream, 0)
    key = apart.get(step.node)
    for earlier in step.waits:
        if apart.get(earlier, key) == key:
            before |= done[earlier]
    return before


def _races(earlier: Access, access: Access, before: int) -> bool:
    """True if an access of an earlier run is not done when another one begins."""
    return earlier.run != access.run and not before >> earlier.bit & 1


def _token(bucket: Bucket, part: Part) -> str:
    """The name of a placeholder for a part."""
    return f"{part.value}_{bucket.label}"


def _end(other: str) -> str:
    return other.partition(" of the ")[0] if other[0].isdigit() else "that"
