"""The kinds of hazards, the view of a schedule that checks get, and the order of ops."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.edges import waits_for
from megacompile.ir.ops import Op
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.values import copied_away, left_by_backward, producer


class HazardKind(enum.Enum):
    """The ways in which a schedule can corrupt, lose or leak values."""

    ARGUMENTS = "arguments"  # a stage is run with too few or too many arguments
    WRONG_ARGUMENT = "wrong argument"  # the backward reads a different value than the forward
    MISSING_WEIGHTS = "missing weights"  # a compute does not get a bucket that it reads
    WRONG_WEIGHTS = "wrong weights"  # a compute gets the weights of another bucket
    UNKNOWN_SLOT = "unknown slot"  # a bucket is assigned to a nonexistent slot
    SLOT_TOO_SMALL = "slot too small"  # a bucket does not fit into its slot
    SLOT_OVERWRITTEN = "slot overwritten"  # write after read: a reader may still run
    SLOT_REFILLED = "slot refilled"  # read after write: another bucket may be there by then
    BEFORE_BEGIN = "before begin"  # a slot is filled while an earlier schedule may read it
    NOT_REUSED = "not reused"  # a slot lacks the bucket that a graph expects there
    SAVED_VALUES = (
        "saved values"  # the forward does not return the values of the backward's placeholders
    )
    USE_BEFORE_MADE = "use before made"  # an op takes a value that a later op returns
    USE_AFTER_FREE = "use after free"  # an op takes a value that an earlier op freed
    FREED_TOO_EARLY = "freed too early"  # free after use: a reader on another stream may still run
    DOUBLE_FREE = "double free"  # a value is freed twice
    NOT_OWNED = "not owned"  # the freed value has no memory of its own (weights, an event)
    LEAK = "leak"  # a value is neither freed nor returned
    CHANGED_IN_PLACE = "changed in place"  # a reader of the old value may run after `assign`
    CHANGE_LOST = "change lost"  # an in-place change of a stage does not reach its input
    WRONG_SAVED = "wrong saved"  # a backward takes another stage's saved tensors
    NOT_OFFLOADED = "not offloaded"  # a fetch takes a value that no offload of the forward returned
    OFFLOAD_LOST = "offload lost"  # a value goes to the host, but the backward cannot find it
    ON_HOST = "on host"  # a compute takes a value's copy on the host
    WRONG_RNG = "wrong rng"  # a recompute would draw different random numbers than the forward
    GRADIENTS_NOT_READY = "gradients not ready"  # offloaded before every backward has added to them
    WRONG_GRADIENTS = "wrong gradients"  # gradients of another bucket
    GRADIENTS_LOST = (
        "gradients lost"  # gradients are not offloaded, or an offload overwrites others
    )
    GRADIENTS_REFILLED = "gradients refilled"  # a pinned buffer is overwritten before it was read
    WRONG_BUFFER = (
        "wrong buffer"  # gradients so far or states are fetched into another bucket's memory
    )
    WRONG_STATE = "wrong state"  # an update takes states of another bucket, or old ones
    STATE_LOST = "state lost"  # an update's result is not offloaded
    UPDATED_TOO_EARLY = "updated too early"  # a later op reads the old values of the bucket
    READ_TOO_EARLY = "read too early"  # an earlier graph may still write what an op reads
    WRITTEN_TOO_EARLY = "written too early"  # an earlier graph may still use what an op writes
    WRONG_TOKEN = "wrong token"  # a graph returns or takes a token that is not the last writer's
    NOT_UPDATED = "not updated"  # a bucket gets gradients, but no op updates it
    WRONG_UPDATE = "wrong update"  # without gradients, for the second time, or in the wrong place
    LEFT_BEHIND = "left behind"  # the backward leaves other values than the update takes
    NOT_READ = "not read"  # states or parameters on a disk are used before they are read
    NOT_WRITTEN = "not written"  # new states or parameters of a bucket on a disk do not reach it
    TOO_MANY_BUFFERS = "too many buffers"  # more are in use for the disk than exist
    RANKS_DIFFER = "ranks differ"  # ranks issue different collectives, or in a different order
    WRONG_HELP = "wrong help"  # the device helps with an update that the host does not run


@dataclass(frozen=True, slots=True)
class Hazard:
    """An error in a schedule; the message says where, what it got, what it needed, and the fix."""

    kind: HazardKind
    graph: str  # "forward", "backward" or "update"
    label: str  # of the op that suffers, e.g. "3F"
    other: str  # of the op that causes it, e.g. "4PREFETCH@0", or ""
    message: str
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False, compare=False)  # to mark

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class View:
    """One graph of a schedule: the argument of every check."""

    schedule: Schedule
    name: str  # "forward", "backward" or "update"
    graph: fx.Graph
    order: Order
    left: Mapping[fx.Node, fx.Node]  # an update's placeholders -> the backward's values
    forwards: Mapping[int, fx.Node]  # by the index of its stage
    copies: Mapping[str, fx.Node]  # the forward's copies on the host or on a disk, by name

    @staticmethod
    def all_of(schedule: Schedule) -> list[View]:
        """A view of each graph of the schedule."""
        left, copies = left_by_backward(schedule), copied_away(schedule)
        forwards = ops.calls_by_stage(schedule.forward, ops.forward)
        return [
            View(schedule, name, graph, Order(graph), left, forwards, copies)
            for name, graph in schedule.graphs.items()
        ]

    def source(self, value: fx.Node) -> fx.Node:
        """The backward's value that an update's placeholder stands for; other values unchanged."""
        return self.left.get(value, value)

    def hazard(
        self, kind: HazardKind, node: fx.Node, other: fx.Node | None, message: str
    ) -> Hazard:
        """A hazard that affects `node` and is caused by `other`."""
        nodes = [producer(n) for n in (node, other) if n is not None]
        labels = [ops.label(n) for n in nodes] + [""]
        text = f"{self.name}: {message}"
        return Hazard(kind, self.name, labels[0], labels[1], text, tuple(dict.fromkeys(nodes)))

    def nodes(self, *targets: Callable[..., Any]) -> list[fx.Node]:
        """The nodes that call one of `targets` (every op without targets), in program order."""
        return ops.nodes_of(self.graph, *targets)

    def with_forwards(self, *targets: Callable[..., Any]) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The nodes that call one of `targets`, each with the forward of its stage."""
        for node in self.nodes(*targets):
            forward = self.forwards.get(ops.arguments(node)[0].index)
            if forward is not None:
                yield node, forward

    def that(self, wanted: Callable[[Op], object]) -> list[fx.Node]:
        """The nodes whose ops satisfy `wanted`, in program order."""
        return [node for node, op in self.order.calls if wanted(op)]


Check = Callable[[View], Iterator[Hazard]]


# The order that a graph proves: [Note: happens-before] in `megacompile.ir.edges`.


@dataclass(frozen=True, slots=True)
class Step:
    """An op or a placeholder, with its direct predecessors."""

    node: fx.Node
    stream: Stream | None  # in-order stream that it is on; None: no such stream
    waits: tuple[fx.Node, ...]  # ops and placeholders


class Order:
    """The happens-before order of one graph.

    Each node has the set of nodes before it as the bits of an integer, so an 80-layer schedule
    takes milliseconds.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.calls = tuple((node, ops.effects(node)) for node in ops.nodes_of(graph))
        self.steps = _steps(graph, self.position)
        bits = {step.node: 1 << self.position[step.node] for step in self.steps}
        self._before, _ = walk(self.steps, bits, {})

    def before(self, first: fx.Node, second: fx.Node) -> bool:
        """True if `first` is done when `second` starts, in every interleaving of the streams."""
        return bool(self._before[producer(second)] >> self.position[producer(first)] & 1)

    def issued_before(self, first: fx.Node, second: fx.Node) -> bool:
        """True if `first` is earlier in the program, which orders nothing on the device."""
        return self.position[first] < self.position[second]


def _steps(graph: fx.Graph, position: dict[fx.Node, int]) -> list[Step]:
    """The ops and placeholders in program order. Edges that point backward are ignored."""
    found = []
    for node in graph.nodes:
        if node.op == "output" or producer(node) is not node:
            continue
        op = ops.op_of(node)
        stream = op.stream if op is not None and op.stream.in_order else None
        made = map(producer, (v for v in waits_for(node) if position[v] < position[node]))
        waits = tuple(source for source in made if position[source] < position[node])
        found.append(Step(node, stream, waits))
    return found


def walk(
    steps: Sequence[Step],
    bits: Mapping[fx.Node, int],
    streams: dict[Stream, int],
    *,
    given: Mapping[fx.Node, int] | None = None,
    base: int = 0,
    apart: Mapping[fx.Node, int] | None = None,
) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """Compute the sets of ops that are done when each op begins and when it ends.

    Args:
        bits: a distinct bit for each node of interest.
        streams: the set that is done before the next op of each stream; updated.
        given: the set that is done when a placeholder is available.
        base: the set that is done before any op.
        apart: the group of an op. Ops of different groups do not order one another.
    """
    given, apart = given or {}, apart or {}
    before: dict[fx.Node, int] = {}
    done: dict[fx.Node, int] = {}
    of_group: defaultdict[int | None, dict[Stream, int]] = defaultdict(
        streams.copy if apart else lambda: streams
    )
    for step in steps:
        node, group = step.node, apart.get(step.node)
        last = of_group[group]
        earlier = 0 if node.op == "placeholder" else base
        if step.stream is not None:
            earlier |= last.get(step.stream, 0)
        for other in step.waits:
            if apart.get(other, group) == group:
                earlier |= done[other]
        before[node] = earlier
        done[node] = earlier | bits.get(node, 0) | given.get(node, 0)
        if step.stream is not None:
            last[step.stream] = done[node]
    for last in of_group.values():
        for stream, so_far in last.items():
            streams[stream] = streams.get(stream, 0) | so_far
    return before, done
