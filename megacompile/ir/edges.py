"""The edges of a schedule: which op waits for which, and what a graph hands to later ones.

[Note: happens-before] Each stream that is in order runs its ops in program order; two ops of one
that is not (`Stream.in_order`) are ordered by edges alone. An op waits for every node among its
arguments and in its `after=`; an item of a tuple stands for the op that returns the tuple.
Nothing else orders anything: two ops are ordered if a path of such edges joins them, and race if
none does. The host issues ops in program order too, so an edge that points backward (a value that
is used before it is made) orders nothing. `megacompile.verify.cycle_checks` says how graphs are
joined.

The proof, the simulation, traces and pictures all read the edges from here. What they add is their
own: the proof distrusts edges that point backward, the simulation drops those between ops of one
queue, a trace passes the waits of an op that it does not record to the next op of its stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import effects
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.tokens import Place, given, token_of
from megacompile.ir.values import producer, reads


class EdgeKind(StrEnum):
    """The reason for which the second op comes after the first one."""

    DATA = "data"  # it takes a value that the first returns
    AFTER = "after"  # it waits until the first is done with a slot or with memory
    STREAM = "stream"  # it comes next on the same stream, which is in order


@dataclass(frozen=True, slots=True)
class Edge:
    """The second op starts when the first one is done."""

    first: fx.Node  # an op, or a placeholder for what an earlier graph hands on
    second: fx.Node
    kind: EdgeKind


def edges(graph: fx.Graph) -> Iterator[Edge]:
    """All edges of a graph, in the order of the second ops in the program.

    Those of an op that only names others (`not op.waits`) are among them: a picture shows them.
    """
    last: dict[Stream, fx.Node] = {}
    for node in ops.nodes_of(graph):
        after: Any = node.kwargs.get("after", ())
        for kind, values in ((EdgeKind.DATA, reads(node)), (EdgeKind.AFTER, after)):
            for source in map(producer, values):
                yield Edge(source, node, kind)
        stream = effects(node).stream
        if stream.in_order:
            if stream in last:
                yield Edge(last[stream], node, EdgeKind.STREAM)
            last[stream] = node


def waits_for(node: fx.Node) -> list[fx.Node]:
    """The values that an op waits for (their producers, that is), besides the op before it on its
    stream."""
    return node.all_input_nodes if effects(node).waits else []


Handed = Place | tuple[int, str]  # a part of a bucket; or the id of a schedule and a value's name


def stands_for(schedule: Schedule, placeholder: fx.Node) -> Handed:
    """The key in `handed` of an earlier graph: of the last write of a part of a bucket (a token), a
    saved value, or what a backward leaves. An input of the model has one that no graph hands on."""
    token = token_of(placeholder)
    return (id(schedule), placeholder.name) if token is None else token.place


def handed(schedule: Schedule, graph_name: str) -> dict[Handed, fx.Node]:
    """The ops that make what later graphs take: saved values of a forward, what a backward leaves
    for the update, last writes of parts of buckets (a forward writes none)."""
    graph = schedule.graphs[graph_name]
    found: dict[Handed, fx.Node] = {}
    if graph_name != "update":
        for value in ops.returned(graph)[1]:
            found[id(schedule), value.name] = producer(value)
    if graph_name != "forward":
        found |= dict[Handed, fx.Node](given(graph).items())
    return found


Maker = tuple[str, fx.Node]  # the name of a graph, and its op


def makers(schedule: Schedule) -> Mapping[Handed, Maker]:
    """The op that makes what a graph hands to later ones, as far as one schedule tells.

    A part of a bucket has one graph that writes it: the backward writes gradients, and the update,
    or a backward that updates, writes weights and states. What a schedule does not write, another
    one may.
    """
    found = ((name, handed(schedule, name)) for name in schedule.graphs)
    return {what: (name, node) for name, made in found for what, node in made.items()}
