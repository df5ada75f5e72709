"""The edges of a schedule: the waits between ops, and the values passed between graphs.

[Note: happens-before] An in-order stream runs its ops in program order; ops on other streams
(`Stream.in_order` is False) are ordered only by edges. An op waits for every node in its arguments
and its `after=`; an item of a tuple represents the op that returns the tuple. There is no other
ordering: two ops are ordered if a path of such edges connects them, and race otherwise. The host
issues ops in program order too, so a backward-pointing edge (a value used before its definition)
orders nothing. `megacompile.verify.cycle_checks` defines how graphs are connected.

The proof, the simulation, traces and pictures all read the edges from this module. Each adds its
own rule: the proof rejects backward-pointing edges, the simulation drops edges within one queue,
and a trace moves the waits of an unrecorded op to the next op of its stream.
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
    """The reason why the second op comes after the first."""

    DATA = "data"  # it reads a value that the first returns
    AFTER = "after"  # it waits until the first has finished with a slot or memory
    STREAM = "stream"  # it is next on the same in-order stream


@dataclass(frozen=True, slots=True)
class Edge:
    """The second op starts after the first has finished."""

    first: fx.Node  # an op, or a placeholder for a value of an earlier graph
    second: fx.Node
    kind: EdgeKind


def edges(graph: fx.Graph) -> Iterator[Edge]:
    """All edges of a graph, in program order of the second ops.

    Includes the edges of ops that only name others (`not op.waits`), for pictures.
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
    """The values whose producers an op waits for, besides the previous op on its stream."""
    return node.all_input_nodes if effects(node).waits else []


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
    """The op in one schedule that produces a value for later graphs.

    Each part of a bucket is written by one graph: the backward writes gradients; the update, or a
    backward that updates, writes weights and states. Another schedule may write what this one does
    not.
    """
    found = ((name, handed(schedule, name)) for name in schedule.graphs)
    return {what: (name, node) for name, made in found for what, node in made.items()}
