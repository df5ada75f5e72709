"""Finds the tokenwise nodes of a traced graph, and the token axis of their results.

    h = mm(x, w)           x (tokens, width): each row of h needs its own row of x, and all of w
    s = sum(h, [0])        a sum over tokens: the sum of the sums of tiles
    a = attention(q, k, v) not tokenwise: each token reads others; samples are independent

Operators without a rule (`token_rules`) are not tokenwise, nor are random numbers: tiles would draw
different ones.
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
    """The cut dimension of a model's activations.

    Args:
        shape: the shape of an activation.
        dim: the cut dimension.
        samples: it is the sample dimension, along which attention can be cut too.
    """

    shape: tuple[int, ...]
    dim: int
    samples: bool = False

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


@dataclass(slots=True)
class Tokenwise:
    """The facts about the nodes of a graph."""

    tokens: Tokens
    acts: dict[fx.Node, Act] = field(default_factory=dict)  # of the tokenwise ones
    axes: dict[fx.Node, Axis] = field(default_factory=dict)  # axes of values with tokens


def find_tokenwise(
    graph: fx.Graph,
    tokens: Tokens,
    whole: frozenset[str],
    rejected: Collection[fx.Node] = (),
) -> Tokenwise:
    """The tokenwise nodes of a graph.

    Args:
        graph: a graph of ATen operators with fake tensors in `meta["val"]`.
        tokens: the cut dimension.
        whole: names of the placeholders without tokens.
        rejected: nodes to treat as not tokenwise despite the rules.
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
    """True if a node creates a constant-valued tensor."""
    return name_of(node) in ("full", "zeros", "ones") and not node.all_input_nodes


def is_view(node: fx.Node) -> bool:
    """True if a node returns an alias of its input; not called for items of a tuple."""
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
    if made is None and name_of(node) in (
        "mm",
        "bmm",
    ):  # an operand may be whole: keys of attention
        for source in reversed(offered):
            rest = {other: axis for other, axis in offered.items() if other is not source}
            made = made or (rule(node, rest, found.tokens.count) if rest else None)
    return made


def _item(node: fx.Node, found: Tokenwise) -> Act | None:
    """An item of a tuple; handled like the node that returns the tuple."""
    source, index = node.args
    act = found.acts.get(source) if isinstance(source, fx.Node) else None
    if act is None or not isinstance(index, int):
        return None
    return Act({}, (act.results[index],))
