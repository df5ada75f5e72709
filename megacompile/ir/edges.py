"""The order of a schedule's ops: edges in a graph, tokens between graphs, collectives of ranks.

[Note: happens-before] An in-order stream runs its ops in program order; ops on other streams
(`Stream.in_order` is False) are ordered only by edges. An op waits for every node in its arguments
and its `after=`; an item of a tuple represents the op that returns the tuple. There is no other
ordering: two ops are ordered if a path of such edges connects them, and race otherwise. The host
issues ops in program order too, so a backward-pointing edge (a value used before its definition)
orders nothing. `megacompile.verify.cycle_checks` defines how graphs are connected.

A graph waits for an earlier graph's work on a bucket by tokens. The earlier graph returns, for each
part of a bucket, the op that wrote it last. The later graph has a placeholder for each part that it
must wait for, and names it in `after=`:

    update     3UPDATE                          the graph returns it
    forward    3PREFETCH@1 after=(weights_3)    the placeholder stands for 3UPDATE

So an edge between graphs is an ordinary edge: it is printed, verified, simulated and executed as a
wait. A placeholder whose part was not written since is empty.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part, Value, effects
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.values import producer, taken
from megacompile.text import format_bytes


def waits_for(node: fx.Node) -> list[fx.Node]:
    """The values whose producers an op waits for, besides the previous op on its stream."""
    return node.all_input_nodes if effects(node).waits else []


Place = tuple[int, Part]  # bucket key and part


@dataclass(frozen=True, slots=True)
class Token:
    """The last write of a bucket's part by an earlier graph, represented by a placeholder."""

    bucket: Bucket
    part: Part

    @property
    def place(self) -> Place:
        return self.bucket.key, self.part


def token_of(node: fx.Node) -> Token | None:
    """The token of a placeholder; None for any other node."""
    token = node.meta.get("token")
    assert token is None or isinstance(token, Token)
    return token


def tokens_of(graph: fx.Graph) -> dict[Place, fx.Node]:
    """The placeholders of a graph for tokens."""
    inputs = ((node, token_of(node)) for node in graph.find_nodes(op="placeholder"))
    return {token.place: node for node, token in inputs if token is not None}


def take(graph: fx.Graph, bucket: Bucket, part: Part) -> fx.Node:
    """The placeholder of a graph for a token, created if missing."""
    return tokens_of(graph).get((bucket.key, part)) or add(graph, bucket, part)


def add(graph: fx.Graph, bucket: Bucket, part: Part, before: fx.Node | None = None) -> fx.Node:
    """A new placeholder for a token without one. `before`: the first node of the graph that is not
    a placeholder, if known."""
    first = before or next((n for n in graph.nodes if n.op != "placeholder"), None)
    name = f"{part.value}_{bucket.suffix}"
    with graph.inserting_before(first):
        made: fx.Node = graph.create_node("placeholder", name, name=name)
    made.meta["token"] = Token(bucket, part)
    return made


def written(node: fx.Node) -> list[Place]:
    """The parts that an op writes, in its order."""
    subject: Any = node.args[0] if node.args else None
    return [(subject.key, part) for part in ops.effects(node).writes]


def given(graph: fx.Graph) -> dict[Place, fx.Node]:
    """The tokens that a graph returns last: the last write of each part."""
    return {place: node for node in ops.returned(graph)[-1] for place in written(node)}


Handed = Place | tuple[int, str]  # a part of a bucket, or the id of a schedule and a value's name


def stands_for(schedule: Schedule, placeholder: fx.Node) -> Handed:
    """A placeholder's key in `handed` of an earlier graph: the last write of a bucket's part (a
    token), a saved value, or a value left by a backward. The key of a model input is in no graph's
    `handed`."""
    token = token_of(placeholder)
    return (id(schedule), placeholder.name) if token is None else token.place


def handed(schedule: Schedule, graph_name: str) -> dict[Handed, fx.Node]:
    """The ops that produce values for later graphs: a forward's saved values, values that a
    backward leaves for the update, last writes of bucket parts (a forward has none)."""
    graph = schedule.graphs[graph_name]
    found: dict[Handed, fx.Node] = {}
    if graph_name != "update":
        for value in ops.returned(graph)[1]:
            found[id(schedule), value.name] = producer(value)
    if graph_name != "forward":
        found |= dict[Handed, fx.Node](given(graph).items())
    return found


Maker = tuple[str, fx.Node]  # the name of a graph and its op


def makers(schedule: Schedule) -> Mapping[Handed, Maker]:
    """The op that produces each value for later graphs: one graph writes each part of a bucket."""
    found = ((name, handed(schedule, name)) for name in schedule.graphs)
    return {what: (name, node) for name, made in found for what, node in made.items()}


# Collectives, which all ranks must issue identically.


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one graph."""

    graph: str  # "forward of Net"
    ops: tuple[str, ...]  # "3ALL_GATHER@1 of layers.3 (774 KiB)", each
    digest: str  # hash of the graph's kind and ops; equal in all ranks

    @staticmethod
    def of(graph: fx.Graph, kind: str, name: str) -> Collectives:
        """The collectives of a graph of this kind ("forward", ...) of the schedule `name`."""
        nodes = ops.nodes_that(graph, lambda op: op.issues and op.stream is Stream.COMM)
        facts = [f"{_shown(n)} {ops.moved_bytes(n)} {_averaged(n)}" for n in nodes]
        digest = hashlib.sha256("\n".join([kind, *facts]).encode()).hexdigest()[:32]
        return Collectives(f"{kind} of {name}", tuple(map(_shown, nodes)), digest)

    def at(self, issued: int) -> str:
        """The op after the first `issued` ones, as named in errors."""
        if not self.ops:
            return self.graph
        return f"{self.ops[min(issued, len(self.ops) - 1)]} of the {self.graph}"


def first_difference(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[int, str, str] | None:
    """The first difference of two sequences of collectives: its position, and both ops."""
    pairs = enumerate(itertools.zip_longest(a, b, fillvalue="none"))
    return next(((i, here, there) for i, (here, there) in pairs if here != there), None)


def _shown(node: fx.Node) -> str:
    """The op as named in errors, with the parameters if it averages only some gradients."""
    bucket = ops.arguments(node)[0]
    size, names = format_bytes(ops.moved_bytes(node)), _averaged(node)
    some = f": {', '.join(names)}" if 0 < len(names) < len(bucket.params) else ""
    return f"{ops.label(node)} of {bucket.name!r} ({size}{some})"


def _averaged(node: fx.Node) -> tuple[str, ...]:
    """The parameters whose gradients an op averages, by name."""
    sums = node.target in (ops.reduce_scatter, ops.all_reduce)
    gradients = taken(node, Value.GRADIENTS) if sums else None
    if gradients is not None and node.target is ops.all_reduce:
        gradients = ops.scattered(gradients)
    call = None if gradients is None else producer(gradients)
    if call is None or call.target is not ops.backward:
        return ()
    stage, bucket = ops.arguments(call)[0], ops.arguments(node)[0]
    places = (param for key, param in stage.gradient_params if key == bucket.key)
    return tuple(bucket.params[place].name for place in sorted(places))
