"""What can be wrong with a schedule, and the order that it does prove.

[Note: happens-before] Each stream runs its ops in program order. An op waits for every node among
its arguments and in its `after=`; an item of a tuple stands for the op that gives the tuple.
Nothing else orders anything: two ops are ordered if a path of such edges joins them, and race if
none does. The host issues ops in program order too, so an edge that points backward (a value that
is used before it is made) orders nothing.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from torch import fx

from megacompile import ops
from megacompile.ir import Schedule, Stream


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
    NOT_HELD = "not held"  # the forward does not leave in a slot what the backward expects there
    RESIDUALS = "residuals"  # the forward does not give what the backward's placeholders stand for
    USE_BEFORE_MADE = "use before made"  # an op takes a value that a later op gives
    USE_AFTER_FREE = "use after free"  # an op takes a value that an earlier op gave back
    FREED_TOO_EARLY = "freed too early"  # free after use: a reader on another stream may still run
    DOUBLE_FREE = "double free"  # a value is given back twice
    NOT_OWNED = "not owned"  # what is given back has no memory of its own (weights, an event)
    LEAK = "leak"  # a value is neither given back nor returned
    CHANGED_IN_PLACE = "changed in place"  # a reader of the old value may run after `assign`
    CHANGE_LOST = "change lost"  # what a stage changes in place does not reach its input
    WRONG_SAVED = "wrong saved"  # a backward takes saved tensors that are not its stage's
    NOT_OFFLOADED = "not offloaded"  # a fetch takes what no offload of the forward gives
    OFFLOAD_LOST = "offload lost"  # a value goes to the host, and the backward cannot find it
    ON_HOST = "on host"  # a compute takes the copy on the host of a value
    WRONG_RNG = "wrong rng"  # a recompute would draw other random numbers than the forward
    GRADIENTS_NOT_READY = "gradients not ready"  # offloaded before every backward has added to them
    WRONG_GRADIENTS = "wrong gradients"  # gradients of one bucket where another's belong
    GRADIENTS_LOST = "gradients lost"  # nobody offloads them, or an offload overwrites others
    GRADIENTS_REFILLED = "gradients refilled"  # a pinned buffer is overwritten before it was read
    WRONG_ROOM = "wrong room"  # gradients so far, or states, are fetched to memory of another's
    WRONG_STATE = "wrong state"  # an update takes the states of another bucket, or old ones
    STATE_LOST = "state lost"  # nobody offloads what an update gives
    UPDATED_TOO_EARLY = "updated too early"  # a later op reads the bucket as it was before


@dataclass(frozen=True, slots=True)
class Hazard:
    """One thing that is wrong: where, what it got, what it needed, what to do."""

    kind: HazardKind
    graph: str  # "forward" or "backward"
    label: str  # of the op that suffers, e.g. "3F"
    other: str  # of the op that harms it, e.g. "4PREFETCH@0"; "" where there is none
    message: str
    nodes: tuple[fx.Node, ...] = field(default=(), repr=False, compare=False)  # to mark

    def __str__(self) -> str:
        return self.message


class Order:
    """The happens-before order of one graph.

    Each node has the set of the nodes before it, as the bits of an integer: an 80-layer schedule
    takes milliseconds.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.edges = _happens_before(graph, self.position)
        self._before: dict[fx.Node, int] = {}
        for node in nx.topological_sort(self.edges):
            before = 0
            for earlier in self.edges.predecessors(node):
                before |= self._before[earlier] | (1 << self.position[earlier])
            self._before[node] = before

    def before(self, first: fx.Node, second: fx.Node) -> bool:
        """Is `first` done when `second` starts, whatever the streams do?"""
        return bool(self._before[producer(second)] >> self.position[producer(first)] & 1)

    def issued_before(self, first: fx.Node, second: fx.Node) -> bool:
        """Is `first` earlier in the program? That orders nothing on the device."""
        return self.position[first] < self.position[second]


@dataclass(frozen=True, slots=True)
class View:
    """One graph of a schedule under inspection: what every check is given."""

    schedule: Schedule
    name: str  # "forward" or "backward"
    graph: fx.Graph
    order: Order

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


MAKE_MEMORY = (  # ops whose value owns memory of the compute stream's allocator
    ops.snapshot,
    ops.alloc,
    ops.fetch,
    ops.alloc_grad,
    ops.fetch_grad,
    ops.add_grad,
    ops.norm_grad,
    ops.alloc_state,
    ops.fetch_state,
    ops.update,
)

Check = Callable[[View], Iterator[Hazard]]


def label(value: fx.Node) -> str:
    """The printed name of the op that gives a value."""
    return ops.label(producer(value))


def named(value: fx.Node) -> str:
    """A value and where it comes from: "y3_0 of 3F"; the name alone for an input of the graph."""
    return value.name if value.op == "placeholder" else f"{value.name} of {label(value)}"


def producer(node: fx.Node) -> fx.Node:
    """The op that gives a value: the item of a tuple comes from the op that gives the tuple."""
    while node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


_SHOWS = {  # op -> argument that it writes to
    ops.fetch: 2,
    ops.fetch_grad: 1,
    ops.add_grad: 1,
    ops.assign: 0,
    ops.fetch_state: 1,
    ops.update: 3,
}


def memory(node: fx.Node) -> fx.Node:
    """The value whose memory a node names: some ops give back, changed, what they were given.

    Fetched gradients fill their room, sums replace what was fetched, assigned inputs stay where
    they are.
    """
    seen = {node}  # values that are made of one another would lead around for ever
    while callable(node.target) and node.target in _SHOWS:
        source = node.args[_SHOWS[node.target]]
        if not isinstance(source, fx.Node) or source in seen:
            break
        seen.add(source)
        node = source
    return node


def reads(node: fx.Node) -> list[fx.Node]:
    """The values that a node takes; what it only waits for (`after=`) is not among them."""
    found: dict[fx.Node, None] = {}
    fx.map_arg(node.args, lambda n: found.setdefault(n))
    return list(found)


def fetched_from(schedule: Schedule, value: fx.Node) -> fx.Node:
    """The forward's value that a `fetch` of the backward brings back; any other value as it is.

    The two graphs share no edge: the offload is the residual that the backward's placeholder of
    the same name stands for, and what the runtime hands over there carries the copy's event.
    """
    if value.target is not ops.fetch:
        return value
    on_host: Any = value.args[1]
    for node in ops.nodes_of(schedule.forward, ops.offload):
        if on_host.op == "placeholder" and node.name == on_host.name:
            source: Any = node.args[1]
            assert isinstance(source, fx.Node)
            return source
    return value


def handed_over(graph: fx.Graph) -> set[fx.Node]:
    """The values whose memory `hand_over` takes: nobody in the schedule gives it back."""
    return {memory(value) for node in ops.nodes_of(graph, ops.hand_over) for value in reads(node)}


def _happens_before(graph: fx.Graph, position: dict[fx.Node, int]) -> nx.DiGraph:
    """[Note: happens-before] as a graph; items are merged into their ops."""
    edges = nx.DiGraph()
    last: dict[Stream, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output" or producer(node) is not node:
            continue
        edges.add_node(node)
        edges.add_edges_from((earlier, node) for earlier in _awaited(node, position))
        stream = ops.stream_of(node)
        if stream in last:
            edges.add_edge(last[stream], node)
        last[stream] = node
    return edges


def _awaited(node: fx.Node, position: dict[fx.Node, int]) -> Iterator[fx.Node]:
    if node.target is ops.park:  # no stream waits for what it keeps
        return
    for value in node.all_input_nodes:
        if position[value] < position[node]:
            yield producer(value)
