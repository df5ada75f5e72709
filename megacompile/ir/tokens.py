"""Tokens: a graph's waits for an earlier graph's work on a bucket.

A graph returns the ops that wrote each part of a bucket last. A later graph has a placeholder for
each part that it must wait for, and names it in `after=`:

    update     3UPDATE                          the graph returns it
    forward    3PREFETCH@1 after=(weights_3)    the placeholder stands for 3UPDATE

So an edge between graphs is an ordinary edge: it is printed, verified, simulated and executed as a
wait. A placeholder whose part was not written since is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part

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


def taken(graph: fx.Graph) -> dict[Place, fx.Node]:
    """The placeholders of a graph for tokens."""
    inputs = ((node, token_of(node)) for node in graph.find_nodes(op="placeholder"))
    return {token.place: node for node, token in inputs if token is not None}


def take(graph: fx.Graph, bucket: Bucket, part: Part) -> fx.Node:
    """The placeholder of a graph for a token, created if missing."""
    return taken(graph).get((bucket.key, part)) or add(graph, bucket, part)


def add(graph: fx.Graph, bucket: Bucket, part: Part, before: fx.Node | None = None) -> fx.Node:
    """A new placeholder for a token without one.

    Args:
        before: the first node of the graph that is not a placeholder, if known.
    """
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
