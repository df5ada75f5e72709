"""Finds the tokenwise nodes of a traced graph, and the token axis of their results.

    h = mm(x, w)           x (tokens, width): each row of h needs its own row of x, and all of w
    s = sum(h, [0])        a sum over tokens: the sum of the sums of tiles
    a = attention(q, k, v) not tokenwise: each token reads others

Operators without a rule (`token_rules`) are not tokenwise, nor are random numbers: tiles would draw
different ones.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from megacompile import compat
from megacompile.cost import aten
from megacompile.ir.tiles import Axis, Result
from megacompile.passes.stages.token_rules import (
    RULES,
    Act,
    name_of,
    pointwise,
    shape_of,
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The cut dimension of a model's activations.

    Args:
        shape: the shape of an activation.
        dim: the cut dimension.
    """

    shape: tuple[int, ...]
    dim: int

    @property
    def count(self) -> int:
        return self.shape[self.dim]

    def axis_in(self, shape: Sequence[int]) -> Axis | None:
        """The likely token axis of an input tensor."""
        exact = [d for d, size in enumerate(shape) if size == self.count]
        if self.dim in exact:
            return Axis(self.dim)
        if exact:
            return Axis(exact[0])
        outer, inner = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 : -1])
        rows = outer * self.count * inner
        flat = [d for d, size in enumerate(shape) if size == rows]
        return Axis(flat[0], outer, inner) if flat else None


def find_tokenwise(
    graph: fx.Graph,
    tokens: Tokens,
    whole: frozenset[str],
    rejected: Collection[fx.Node] = (),
) -> dict[fx.Node, Act]:
    """The tokenwise nodes of a graph, with their actions.

    Args:
        graph: a graph of ATen operators with fake tensors in `meta["val"]`.
        tokens: the cut dimension.
        whole: names of the placeholders without tokens.
        rejected: nodes to treat as not tokenwise despite the rules.
    """
    acts: dict[fx.Node, Act] = {}
    axes: dict[fx.Node, Axis] = {}  # of values with tokens
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function") or node.name in whole:
            continue
        act = None
        if node.op == "call_function" and node not in rejected and not compat.is_random(node):
            act = _act(node, tokens, acts, axes)
        shape = shape_of(node)
        of_weight = is_view(node) and axes.keys().isdisjoint(node.all_input_nodes)
        axis = None if shape is None or of_weight else tokens.axis_in(shape)
        if act is not None:
            acts[node], axis = act, act.axis
        if axis is not None:
            axes[node] = axis
    return acts


def is_fill(node: fx.Node) -> bool:
    """True if a node creates a constant-valued tensor."""
    return name_of(node) in ("full", "zeros", "ones") and not node.all_input_nodes


def is_view(node: fx.Node) -> bool:
    """True if a node returns an alias of its input; not called for items of a tuple."""
    return node.target is not operator.getitem and aten.is_view(node)


def _act(
    node: fx.Node, tokens: Tokens, acts: Mapping[fx.Node, Act], axes: Mapping[fx.Node, Axis]
) -> Act | None:
    name, source = name_of(node), node.args[0] if node.args else None
    if is_fill(node):
        axis = tokens.axis_in(shape_of(node) or ())
        return None if axis is None else Act({}, ((Result.CUT, axis),))
    if node.target is operator.getitem:  # handled like the node that returns the tuple
        act, index = acts.get(source), node.args[1]  # type: ignore[arg-type]
        return Act({}, (act.results[index],)) if act and isinstance(index, int) else None
    rule = RULES.get(name)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = pointwise
    offered = {n: axes[n] for n in node.all_input_nodes if n in axes}
    if rule is None or not offered or any(shape_of(n) is None for n in node.all_input_nodes):
        return None
    made = rule(node, offered, tokens.count)
    if made is None and name in ("mm", "bmm"):  # an operand may be whole: keys of attention
        for source in reversed(offered):
            rest = {other: axis for other, axis in offered.items() if other is not source}
            made = made or (rule(node, rest, tokens.count) if rest else None)
    return made
