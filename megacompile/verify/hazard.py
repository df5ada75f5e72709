"""The kinds of hazards, the view of a schedule that a check is given, and the order of ops."""

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
    """The ways in which a schedule can corrupt, lose or keep what it should not."""

    ARGUMENTS = "arguments"  # a stage is run with too few or too many arguments
    WRONG_ARGUMENT = "wrong argument"  # the backward reads another value than the forward read
    MISSING_WEIGHTS = "missing weights"  # a compute reads a bucket that it is not given
    WRONG_WEIGHTS = "wrong weights"  # a compute is given the weights of another bucket
    UNKNOWN_SLOT = "unknown slot"  # a bucket goes to a slot that the schedule does not have
    SLOT_TOO_SMALL = "slot too small"  # a bucket does not fit into its slot
    SLOT_OVERWRITTEN = "slot overwritten"  # write after read: a reader may still run
    SLOT_REFILLED = "slot refilled"  # read after write: another bucket may be there by then
    BEFORE_BEGIN = "before begin"  # a slot is filled while an earlier schedule may read it
    NOT_REUSED = (
        "not reused"  # the forward does not leave in a slot what the backward expects there
    )
    SAVED_VALUES = (
        "saved values"  # the forward does not give what the backward's placeholders stand for
    )
    USE_BEFORE_MADE = "use before made"  # an op takes a value that a later op returns
    USE_AFTER_FREE = "use after free"  # an op takes a value that an earlier op gave back
    FREED_TOO_EARLY = "freed too early"  # free after use: a reader on another stream may still run
    DOUBLE_FREE = "double free"  # a value is given back twice
    NOT_OWNED = "not owned"  # what is given back has no memory of its own (weights, an event)
    LEAK = "leak"  # a value is neither given back nor returned
    CHANGED_IN_PLACE = "changed in place"  # a reader of the old value may run after `assign`
    CHANGE_LOST = "change lost"  # what a stage changes in place does not reach its input
    WRONG_SAVED = "wrong saved"  # a backward takes saved tensors that are not its stage's
    NOT_OFFLOADED = "not offloaded"  # a fetch takes what no offload of the forward returns
    OFFLOAD_LOST = "offload lost"  # a value goes to the host, and the backward cannot find it
    ON_HOST = "on host"  # a compute takes the copy on the host of a value
    WRONG_RNG = "wrong rng"  # a recompute would draw other random numbers than the forward
    GRADIENTS_NOT_READY = "gradients not ready"  # offloaded before every backward has added to them
    WRONG_GRADIENTS = "wrong gradients"  # gradients of one bucket where another's belong
    GRADIENTS_LOST = "gradients lost"  # they are not offloaded, or an offload overwrites others
    GRADIENTS_REFILLED = "gradients refilled"  # a pinned buffer is overwritten before it was read
    WRONG_BUFFER = "wrong buffer"  # gradients so far, or states, are fetched to memory of another's
    WRONG_STATE = "wrong state"  # an update takes the states of another bucket, or old ones
    STATE_LOST = "state lost"  # what an update returns is not offloaded
    UPDATED_TOO_EARLY = "updated too early"  # a later op reads the bucket as it was before
    READ_TOO_EARLY = "read too early"  # an earlier graph may still write what is read
    WRITTEN_TOO_EARLY = "written too early"  # an earlier graph may still use what is written
    WRONG_TOKEN = "wrong token"  # a graph returns, or takes, another token than the last writer
    NOT_UPDATED = "not updated"  # a bucket gets gradients, and no op updates it
    WRONG_UPDATE = "wrong update"  # of a bucket without gradients, twice, or where it is not
    LEFT_BEHIND = "left behind"  # the backward leaves other values than the update takes
    NOT_READ = "not read"  # states or parameters on a disk are used where they are not
    NOT_WRITTEN = "not written"  # new states or parameters of a bucket on a disk do not reach it
    TOO_MANY_BUFFERS = "too many buffers"  # are taken on the way to a disk, or back from it
    RANKS_DIFFER = "ranks differ"  # two ranks issue other collectives, or in another order
    WRONG_HELP = "wrong help"  # the device helps with what the host does not do


@dataclass(frozen=True, slots=True)
class Hazard:
    """One thing that is wrong: where, what it got, what it needed, what to do."""

    kind: HazardKind
    graph: str  # "forward", "backward" or "update"
    label: str  # of the op that suffers, e.g. "3F"
    other: str  # of the op that harms it, e.g. "4PREFETCH@0"; "" where there is none
    message: str
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False, compare=False)  # to mark

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class View:
    """One graph of a schedule under inspection: what every check is given."""

    schedule: Schedule
    name: str  # "forward", "backward" or "update"
    graph: fx.Graph
    order: Order
    left: Mapping[fx.Node, fx.Node]  # an update's placeholders -> the backward's values
    forwards: Mapping[int, fx.Node]  # by the index of its stage
    copies: Mapping[str, fx.Node]  # the forward's on the host or on a disk, by name

    @staticmethod
    def all_of(schedule: Schedule) -> list[View]:
        """A view of each graph: the forward, and what there is of backward and update."""
        left, copies = left_by_backward(schedule), copied_away(schedule)
        forwards = ops.calls_by_stage(schedule.forward, ops.forward)
        return [
            View(schedule, name, graph, Order(graph), left, forwards, copies)
            for name, graph in schedule.graphs.items()
        ]

    def source(self, value: fx.Node) -> fx.Node:
        """The backward's value that an update's placeholder stands for; any other as it is."""
        return self.left.get(value, value)

    def hazard(
        self, kind: HazardKind, node: fx.Node, other: fx.Node | None, message: str
    ) -> Hazard:
        """A hazard that `node` suffers and `other` brings about."""
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
        """The nodes whose ops have an effect, in program order."""
        return [node for node, op in self.order.calls if wanted(op)]


Check = Callable[[View], Iterator[Hazard]]


# The order that a graph proves: [Note: happens-before] in `megacompile.ir.edges`.


@dataclass(frozen=True, slots=True)
class Step:
    """An op or a placeholder, and what comes directly before it."""

    node: fx.Node
    stream: Stream | None  # whose op before this one is done; None: of no stream that is in order
    waits: tuple[fx.Node, ...]  # ops and placeholders


class Order:
    """The happens-before order of one graph.

    Each node has the set of the nodes before it, as the bits of an integer: an 80-layer schedule
    takes milliseconds.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.calls = tuple((node, ops.effects(node)) for node in ops.nodes_of(graph))
        self.steps = _steps(graph, self.position)
        bits = {step.node: 1 << self.position[step.node] for step in self.steps}
        self._before, _ = walk(self.steps, bits, {})

    def before(self, first: fx.Node, second: fx.Node) -> bool:
        """True if `first` is done when `second` starts, whatever the streams do."""
        return bool(self._before[producer(second)] >> self.position[producer(first)] & 1)

    def issued_before(self, first: fx.Node, second: fx.Node) -> bool:
        """Is `first` earlier in the program? That orders nothing on the device."""
        return self.position[first] < self.position[second]


def _steps(graph: fx.Graph, position: dict[fx.Node, int]) -> list[Step]:
    """The ops and placeholders in program order. An edge that points backward orders nothing."""
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
    """Go through a graph, and find what is done when each op begins, and when it is done.

    Args:
        bits: of each node that is asked for, a bit of its own.
        streams: what is done when the next op of each begins; brought up to date.
        given: what is done when a placeholder is there.
        base: what is done before any op.
        apart: the group of an op. Ops of two groups do not order one another.
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
