"""Tokens: how a graph waits for what an earlier graph does to a bucket.

A graph returns the ops that were the last to write a part of a bucket. A later graph has a
placeholder for each part that it must not touch before, and names it in `after=`:

    update     3UPDATE                          returns it
    forward    3PREFETCH@1 after=(weights_3)    the placeholder stands for 3UPDATE

So an edge between graphs is an edge like any other: it is printed, verified, simulated, and carried
out as a wait. A placeholder whose part was not written since stands for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part

Place = tuple[int, Part]  # the key of a bucket, and a part of it


@dataclass(frozen=True, slots=True)
class Token:
    """The last write of a part of a bucket by an earlier graph; a placeholder stands for it."""

    bucket: Bucket
    part: Part

    @property
    def place(self) -> Place:
        return self.bucket.key, self.part


def token_of(node: fx.Node) -> Token | None:
    """The token that a placeholder stands for; None for every other node."""
    token = node.meta.get("token")
    assert token is None or isinstance(token, Token)
    return token


def taken(graph: fx.Graph) -> dict[Place, fx.Node]:
    """The placeholders of a graph for tokens."""
    inputs = ((node, token_of(node)) for node in graph.find_nodes(op="placeholder"))
    return {token.place: node for node, token in inputs if token is not None}


def take(graph: fx.Graph, bucket: Bucket, part: Part) -> fx.Node:
    """The placeholder of a graph for a token, made where there is none."""
    return taken(graph).get((bucket.key, part)) or add(graph, bucket, part)


def add(graph: fx.Graph, bucket: Bucket, part: Part, before: fx.Node | None = None) -> fx.Node:
    """A new placeholder for a token, of which the graph has none yet.

    Args:
        before: the first node of the graph that is no placeholder, where that is known.
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
    """The tokens that a graph returns, after everything else: who wrote each part last."""
    return {place: node for node in ops.returned(graph)[-1] for place in written(node)}
