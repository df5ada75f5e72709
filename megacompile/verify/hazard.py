"""The kinds of hazards, the view of a schedule that checks get, and the order of ops."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from megacompile.ir import ops
from megacompile.ir.edges import waits_for
from megacompile.ir.ops import Op, Value
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.values import copied_away, left_by_backward, producer


class HazardKind(enum.Enum):
    """The ways in which a schedule can corrupt, lose or leak values, each with its usual fix."""

    fix: str

    def __new__(cls, words: str, fix: str = "") -> HazardKind:
        """A kind with the name that messages show, and the fix that they end with."""
        kind = object.__new__(cls)
        kind._value_, kind.fix = words, fix
        return kind

    ARGUMENTS = "arguments", "pass what its template takes"
    WRONG_ARGUMENT = "wrong argument", "pass the value that was made for it"
    WRONG_SLOT = "wrong slot", "raise slots, or make each as large as its largest bucket"
    SLOT_REFILLED = "slot refilled", "raise slots, lower lookahead, or fill the slot later"
    NOT_REUSED = "not reused", "correct schedule.reused, or prefetch it"
    HANDED_ON = "handed on", "make the schedule, its graphs' outputs and their inputs agree"
    USE_BEFORE_MADE = "use before made", "move the use after it"
    USE_AFTER_FREE = "use after free", "free it later"
    FREED_TOO_EARLY = "freed too early"  # a reader on another stream may still run
    WRONG_FREE = "wrong free", "drop a free"
    LEAK = "leak", "free it after its last reader"
    LOST = "lost", "pass each result to the one op that takes it"
    RACE = "race"  # accesses of which one writes
    CHANGED_EARLY = "changed early", "change it after its last reader"
    WRONG_UPDATE = "wrong update", "update each bucket once, in the place where it is"
    DISK = "disk", "name one read of its bucket, and write it after its change"
    TOO_MANY_BUFFERS = "too many buffers"  # more are in use for the disk than exist
    WRONG_HELP = "wrong help", "pass updates that the host runs, each once"


@dataclass(frozen=True, slots=True)
class Hazard:
    """An error in a schedule; the message says where, what it got, what it needed, and the fix."""

    kind: HazardKind
    message: str  # begins with the name of the graph
    # the op that suffers, and the op that causes it, if there is one
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class View:
    """One graph of a schedule: the argument of every check."""

    schedule: Schedule
    name: str  # "forward", "backward" or "update"
    graph: fx.Graph
    order: Order
    left: Mapping[fx.Node, fx.Node]  # an update's placeholders -> the backward's values
    forwards: Mapping[int, fx.Node]  # by the index of its stage
    copies: Mapping[str, tuple[Value | None, str]]  # see `copied_away`

    @staticmethod
    def all_of(schedule: Schedule) -> list[View]:
        """A view of each graph of the schedule."""
        left, copies = left_by_backward(schedule), copied_away(schedule.forward)
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
        """A hazard that affects `node` and is caused by `other`. The message ends with the kind's
        fix unless it has one of its own, after a semicolon."""
        nodes = [producer(n) for n in (node, other) if n is not None]
        text = f"{self.name}: {message}" + ("" if "; " in message else f"; {kind.fix}")
        return Hazard(kind, text, tuple(nodes))

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
    """The happens-before order of one graph. Each node has the set of nodes before it as the bits
    of an integer, so an 80-layer schedule takes milliseconds. Edges that point backward are
    ignored."""

    def __init__(self, graph: fx.Graph) -> None:
        position = self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.calls = tuple((node, ops.effects(node)) for node in ops.nodes_of(graph))
        self.steps: list[Step] = []  # in program order
        for node in graph.nodes:
            if node.op != "output" and producer(node) is node:
                op = ops.op_of(node)
                stream = op.stream if op is not None and op.stream.in_order else None
                earlier = (value for value in waits_for(node) if position[value] < position[node])
                self.steps.append(Step(node, stream, tuple(map(producer, earlier))))
        bits = {step.node: 1 << position[step.node] for step in self.steps}
        self._before, _ = walk(self.steps, bits, {})

    def before(self, first: fx.Node, second: fx.Node) -> bool:
        """True if `first` is done when `second` starts, in every interleaving of the streams."""
        return bool(self._before[producer(second)] >> self.position[producer(first)] & 1)

    def issued_before(self, first: fx.Node, second: fx.Node) -> bool:
        """True if `first` is earlier in the program, which orders nothing on the device."""
        return self.position[first] < self.position[second]


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
