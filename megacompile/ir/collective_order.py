"""The collectives of a graph in program order, which all ranks must issue identically."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Value
from megacompile.ir.values import producer, taken
from megacompile.text import format_bytes


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of one graph."""

    graph: str  # "forward of Net"
    ops: tuple[str, ...]  # "3ALL_GATHER@1 of layers.3 (774 KiB)", each
    digest: str  # hash of the graph's kind and ops; equal in all ranks

    @staticmethod
    def of(graph: fx.Graph, kind: str, name: str) -> Collectives:
        """The collectives of a schedule's graph.

        Args:
            kind: "forward", "backward" or "update".
            name: the schedule's name.
        """
        nodes = ops.nodes_that(graph, ops.alike)
        facts = [f"{kind}\n", *(f"{_shown(n)} {_bytes(n)} {_averaged(n)}\n" for n in nodes)]
        digest = hashlib.sha256("".join(facts).encode()).hexdigest()[:32]
        return Collectives(f"{kind} of {name}", tuple(map(_shown, nodes)), digest)

    def at(self, issued: int) -> str:
        """The op after the first `issued` ones, as named in errors."""
        if not self.ops:
            return self.graph
        return f"{self.ops[min(issued, len(self.ops) - 1)]} of the {self.graph}"


def first_difference(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[int, str, str] | None:
    """The first difference of two sequences of collectives: its position, and both ops."""
    for i in range(max(len(a), len(b))):
        here = a[i] if i < len(a) else "none"
        there = b[i] if i < len(b) else "none"
        if here != there:
            return i, here, there
    return None


def _bytes(node: fx.Node) -> int:
    gathered = ops.effects(node).gathered
    return ops.copied_bytes(node) if gathered is None else gathered(node)


def _shown(node: fx.Node) -> str:
    """The op as named in errors; lists the parameters if it averages only some of a bucket's
    gradients."""
    bucket = ops.arguments(node)[0]
    size, names = format_bytes(_bytes(node)), _averaged(node)
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
