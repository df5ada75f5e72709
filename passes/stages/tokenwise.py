"""Finds the nodes of a traced graph that act on each token alone, and the axis of tokens in their
results.

    h = mm(x, w)           x (tokens, width): each row of h needs its own row of x, and all of w
    s = sum(h, [0])        a sum over tokens: the sum of the sums of tiles
    a = attention(q, k, v) not tokenwise: each token looks at others. Each sample is alone

What no rule (`token_rules`) knows is not tokenwise, nor are random numbers: tiles would draw
others.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from megacompile import compat
from megacompile.cost import aten
from megacompile.ir.tiles import Axis, Result
from megacompile.passes.stages.token_rules import (
    ATTENTION,
    RULES,
    Act,
    name_of,
    pointwise,
    shape_of,
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The dimension of a model's activations that is cut.

    Args:
        shape: of an activation.
        dim: of its dimensions.
        samples: attention may be cut along it too, where it is that of samples.
    """

    shape: tuple[int, ...]
    dim: int
    samples: bool = False

    @property
    def count(self) -> int:
        return self.shape[self.dim]

    def axis_in(self, shape: Sequence[int]) -> Axis | None:
        """The likely axis of tokens in a tensor that comes from outside."""
        exact = [d for d, size in enumerate(shape) if size == self.count]
        if self.dim in exact:
            return Axis(self.dim)
        if exact:
            return Axis(exact[0])
        outer, inner = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 : -1])
        rows = outer * self.count * inner
        flat = [d for d, size in enumerate(shape) if size == rows]
        return Axis(flat[0], outer, inner) if flat else None


@dataclass(slots=True)
class Tokenwise:
    """The facts about the nodes of a graph."""

    tokens: Tokens
    acts: dict[fx.Node, Act] = field(default_factory=dict)  # of the tokenwise ones
    axes: dict[fx.Node, Axis] = field(default_factory=dict)  # of values that have tokens


def find_tokenwise(
    graph: fx.Graph,
    tokens: Tokens,
    whole: frozenset[str],
    rejected: Collection[fx.Node] = (),
) -> Tokenwise:
    """The tokenwise nodes of a graph.

    Args:
        graph: of ATen operators, whose nodes have fake tensors as `meta["val"]`.
        tokens: what is cut.
        whole: names of the placeholders that have no tokens.
        rejected: nodes that are not tokenwise, whatever the rules say.
    """
    found = Tokenwise(tokens)
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in whole:
            continue
        may = node.op == "call_function" and node not in rejected
        act = _act(node, found) if may else None
        if act is not None:
            found.acts[node] = act
        axis = _axis(node, act, found)
        if axis is not None:
            found.axes[node] = axis
    return found


def is_fill(node: fx.Node) -> bool:
    """True if a node makes a tensor of one value, out of nothing."""
    return name_of(node) in ("full", "zeros", "ones") and not node.all_input_nodes


def is_view(node: fx.Node) -> bool:
    """Does a node give the memory that it takes? One of a tuple's is not asked for."""
    return node.target is not operator.getitem and aten.is_view(node)


def _axis(node: fx.Node, act: Act | None, found: Tokenwise) -> Axis | None:
    if act is not None:
        return act.axis
    shape = shape_of(node)
    if shape is None or node.op not in ("placeholder", "call_function"):
        return None
    if is_view(node) and not any(source in found.axes for source in node.all_input_nodes):
        return None  # of a weight
    return found.tokens.axis_in(shape)


def _act(node: fx.Node, found: Tokenwise) -> Act | None:
    if compat.is_random(node):
        return None
    if is_fill(node):
        shape = shape_of(node)
        axis = None if shape is None else found.tokens.axis_in(shape)
        return None if axis is None else Act({}, ((Result.CUT, axis),))
    if node.target is operator.getitem:
        return _item(node, found)
    rule = RULES.get(name_of(node))
    if rule is None and found.tokens.samples:
        rule = ATTENTION.get(name_of(node))
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = pointwise
    offered = {n: found.axes[n] for n in node.all_input_nodes if n in found.axes}
    if rule is None or not offered or any(shape_of(n) is None for n in node.all_input_nodes):
        return None
    made = rule(node, offered, found.tokens.count)
    if made is None and name_of(node) in ("mm", "bmm"):  # one may be whole: keys of attention
        for source in reversed(offered):
            rest = {other: axis for other, axis in offered.items() if other is not source}
            made = made or (rule(node, rest, found.tokens.count) if rest else None)
    return made


def _item(node: fx.Node, found: Tokenwise) -> Act | None:
    """One of a tuple's; it goes with the node that returns the tuple."""
    source, index = node.args
    act = found.acts.get(source) if isinstance(source, fx.Node) else None
    if act is None or not isinstance(index, int):
        return None
    return Act({}, (act.results[index],))
