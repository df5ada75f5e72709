"""Finds the tokenwise nodes of a traced graph, and the token axis of their results.

    h = mm(x, w)           x (tokens, width): each row of h needs its own row of x, and all of w
    s = sum(h, [0])        a sum over tokens: the sum of the sums of tiles
    a = attention(q, k, v) not tokenwise: each token reads others

A rule, (node, the axes of operands, tokens) -> its action or None, depends only on the operator,
never on the model. It states that a part of the result needs only that part of the operands, or
that the result is a sum over parts, for any choice of the token dimension. Operators without a rule
are not tokenwise, nor are random numbers: tiles would draw different ones.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.cost import aten
from megacompile.cost.aten import name_of
from megacompile.ir.tiles import Axis, Result

Kinds = tuple[tuple[Result, Axis | None], ...]
Axes = Mapping[fx.Node, Axis]


@dataclass(frozen=True, slots=True)
class Act:
    """The action of a tokenwise node: the cut operands and the kinds of results."""

    cuts: Axes
    results: Kinds
    items: bool = False  # the node returns a tuple

    @property
    def axis(self) -> Axis | None:
        """The axis of the only result; None for a sum, and for a tuple."""
        return None if self.items else self.results[0][1]


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of a node that returns one tensor of known size."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(type(n) is int for n in value.shape):
        return None
    return tuple(value.shape)


Rule = Callable[[fx.Node, Axes, int], Act | None]
Move = Callable[[fx.Node, fx.Node, Axis], Axis | None]


def _arguments(node: fx.Node) -> dict[str, Any]:
    return dict(compat.arguments_of(node))


def _rank(node: Any) -> int:
    return len(shape_of(node) or ())


def _aligned(
    operands: Sequence[fx.Node], axes: Axes, rank: int, tokens: int
) -> tuple[Axis, dict[fx.Node, Axis]] | None:
    """The token axis of the broadcast shape, and the cut axis of each operand."""
    given = [node for node in operands if node in axes]
    found = {replace(axes[node], dim=axes[node].dim + rank - _rank(node)) for node in given}
    if len(found) != 1:
        return None
    (axis,) = found
    cuts = {}
    for node in operands:
        shape = shape_of(node) or ()
        dim = axis.dim - (rank - len(shape))
        if dim < 0 or (shape[dim] == 1 and axis.size(tokens) != 1):
            if node in axes:
                return None
            continue  # broadcast over tokens
        if shape[dim] != axis.size(tokens):
            return None
        cuts[node] = replace(axis, dim=dim)
    return axis, cuts


def pointwise(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    shape = shape_of(node)
    if shape is None:
        return None
    made = _aligned(node.all_input_nodes, axes, len(shape), tokens)
    if made is None or shape[made[0].dim] != made[0].size(tokens):
        return None
    return Act(made[1], ((Result.CUT, made[0]),))


def _along(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """The rule of a shape-preserving operation along another dimension, such as softmax."""
    dim = _arguments(node)["dim"] % max(1, _rank(node))
    act = pointwise(node, axes, tokens)
    return act if act is not None and act.axis is not None and act.axis.dim != dim else None


# Operators whose results have all tokens of one operand, and no tokens of others.


def _moved(move: Move, at: int = 0) -> Rule:
    """The rule of such an operator: `move` returns the axis of its results. `at`: the position of
    the operand with tokens."""

    def rule(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
        source, value = node.args[at], node.meta["val"]
        if not isinstance(source, fx.Node) or source not in axes:
            return None
        axis = move(node, source, axes[source])
        if axis is None or any(n in axes for n in node.all_input_nodes if n is not source):
            return None
        items = isinstance(value, (tuple, list))
        results = ((Result.CUT, axis),) * (len(value) if items else 1)
        return Act({source: axes[source]}, results, items=items)

    return rule


def reshaped(axis: Axis, before: Sequence[int], after: Sequence[int]) -> Axis | None:
    """The token axis after a reshape; None if the reshape splits it."""
    outer = math.prod(before[: axis.dim]) * axis.outer
    inner = math.prod(before[axis.dim + 1 :]) * axis.inner
    if 0 in before:
        return None
    for dim, size in enumerate(after):
        left, right = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if outer % left == 0 and inner % right == 0:
            made = Axis(dim, outer // left, inner // right)
            if size % (made.outer * made.inner) == 0 and size > 1:
                return made
    return None


def _permute(node: fx.Node, source: fx.Node, axis: Axis) -> Axis:
    order, given = list(range(_rank(node))), _arguments(node)
    if name_of(node) == "permute":
        order = [d % len(order) for d in given["dims"]]
    elif name_of(node) == "t":
        order.reverse()
    else:
        a, b = (given[key] % len(order) for key in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    return replace(axis, dim=order.index(axis.dim))


def _expand(node: fx.Node, source: fx.Node, axis: Axis) -> Axis | None:
    shape, sizes = shape_of(node) or (), shape_of(source) or ()
    made = replace(axis, dim=axis.dim + len(shape) - len(sizes))
    return made if shape[made.dim] == sizes[axis.dim] else None


def _slice(node: fx.Node, source: fx.Node, axis: Axis) -> Axis | None:
    """The axis after a slice of another dimension; it shifts if that dimension is removed."""
    dim = _arguments(node)["dim"] % _rank(source)
    if dim == axis.dim:
        return None
    removed = _rank(source) - _rank(node) if dim < axis.dim else 0
    return replace(axis, dim=axis.dim - removed)


def _norm(node: fx.Node, source: fx.Node, axis: Axis) -> Axis | None:
    """The axis of a norm over the last dimensions, whose statistics have the same rank."""
    return axis if axis.dim < _rank(source) - len(_arguments(node)["normalized_shape"]) else None


def _dims(node: fx.Node, source: fx.Node) -> list[int]:
    rank, dims = _rank(source), _arguments(node).get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return [d % rank for d in dims] if rank else []


def _reduced(node: fx.Node, source: fx.Node, axis: Axis) -> Axis | None:
    dims, given = _dims(node, source), _arguments(node)
    below = 0 if given.get("keepdim") else sum(d < axis.dim for d in dims)
    return None if axis.dim in dims else replace(axis, dim=axis.dim - below)


def _sum(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    source: Any = node.args[0]
    if source in axes and axes[source].dim in _dims(node, source):
        return Act({source: axes[source]}, ((Result.SUM, None),))
    return _moved(_reduced)(node, axes, tokens)


def _all_cut(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """The rule of an operation along another dimension: operands have equal rank and are all
    cut."""
    act, operands = pointwise(node, axes, tokens), node.all_input_nodes
    alike = all(_rank(operand) == _rank(node) for operand in operands)
    return act if act is not None and alike and len(act.cuts) == len(operands) else None


def _product(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """The rule for matrices in the last two dimensions, one or many."""
    if len(node.all_input_nodes) < 2:  # a product with itself
        return None
    a, b = node.all_input_nodes[:2]
    sums = Result.PRODUCT if name_of(node) == "mm" else Result.SUM
    rank, left, right = _rank(a), axes.get(a), axes.get(b)
    rows, columns = rank - 2, rank - 1
    if left is not None and right is not None:
        same = (left.outer, left.inner) == (right.outer, right.inner)
        if same and left.dim == right.dim < rows:  # tokens within each matrix
            return Act({a: left, b: right}, ((Result.CUT, left),))
        if same and left.dim == columns and right.dim == rows:
            return Act({a: left, b: right}, ((sums, None),))
        return None
    one = left or right
    if one is not None and one.dim < rows:  # matrices of all tokens, of one operand or of both
        return Act({a: one, b: one}, ((Result.CUT, one),))
    if left is not None and left.dim == rows:
        return Act({a: left}, ((Result.CUT, left),))
    if right is not None and right.dim == columns:
        return Act({b: right}, ((Result.CUT, right),))
    return None


def _scaled_mm(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """The rule of a product of fp8 factors: cut along rows of the first or columns of the second,
    with their scales. A sum over tokens is not supported, because scales may span all tokens."""
    given = _arguments(node)
    for key, scale_key, dim in (("self", "scale_a", 0), ("mat2", "scale_b", 1)):
        operand, scale, bias = given[key], given[scale_key], given.get("bias")
        axis = axes.get(operand)
        if axis is None or axis.dim != dim or (bias is not None and dim == 1):
            continue
        cuts, of_each = {operand: axis}, [1, 1]
        of_each[dim] = axis.size(tokens)
        shape = shape_of(scale)
        if shape is None or math.prod(shape) > 1 and list(shape) != of_each:
            continue  # scales of blocks
        if math.prod(shape) > 1:
            cuts[scale] = axis
        return Act(cuts, ((Result.CUT, axis),))
    return None


def _norm_backward(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    given = _arguments(node)
    each = [given["grad_out"], given["input"], given.get("mean"), given.get("rstd")]
    operands = [n for n in each if isinstance(n, fx.Node)]
    made = _aligned(operands, axes, _rank(operands[0]), tokens)
    if made is None or made[0].dim >= _rank(operands[0]) - len(given["normalized_shape"]):
        return None
    if any(n in axes for n in node.all_input_nodes if n not in operands):
        return None
    kinds: Kinds = ((Result.CUT, made[0]), *((Result.SUM, None) for _ in node.meta["val"][1:]))
    return Act(made[1], kinds, items=True)


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **_rules(pointwise, "alias detach clone _to_copy convert_element_type"),
    **_rules(pointwise, "full_like zeros_like ones_like empty_like"),
    **_rules(_along, "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data"),
    **_rules(
        _moved(lambda node, x, axis: reshaped(axis, shape_of(x) or (), shape_of(node) or ())),
        "view _unsafe_view reshape unsqueeze squeeze",
    ),
    **_rules(_moved(_permute), "permute transpose t"),
    **_rules(_moved(_expand), "expand"),
    **_rules(_moved(_slice), "slice select"),
    **_rules(
        _moved(lambda n, x, axis: None if _arguments(n)["dim"] % _rank(x) == axis.dim else axis),
        "split split_with_sizes unbind",
    ),
    **_rules(_moved(_reduced), "mean amax amin var var_mean prod any all logsumexp argmax argmin"),
    **_rules(_moved(_norm), "native_layer_norm _fused_rms_norm"),
    **_rules(_norm_backward, "native_layer_norm_backward _fused_rms_norm_backward"),
    **_rules(_all_cut, "cat slice_scatter"),
    "sum": _sum,
    **_rules(_product, "mm bmm"),
    "addmm": _moved(lambda n, x, axis: None if axis.dim or _rank(n.args[0]) > 1 else axis, 1),
    "_scaled_mm": _scaled_mm,
    "embedding": _moved(lambda node, indices, axis: axis, 1),
}


@dataclass(frozen=True, slots=True)
class Tokens:
    """The cut dimension of a model's activations."""

    shape: tuple[int, ...]  # of an activation
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
    graph: fx.Graph, tokens: Tokens, whole: frozenset[str], rejected: Collection[fx.Node] = ()
) -> dict[fx.Node, Act]:
    """The tokenwise nodes of an ATen graph, with their actions. `whole`: names of the placeholders
    without tokens; `rejected`: nodes that are not tokenwise despite the rules."""
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
    """True if a node returns an alias of its input; False for items of a tuple."""
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
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    rule = RULES.get(name, pointwise if is_pointwise else None)
    offered = {n: axes[n] for n in node.all_input_nodes if n in axes}
    if rule is None or not offered or any(shape_of(n) is None for n in node.all_input_nodes):
        return None
    made = rule(node, offered, tokens.count)
    if made is None and name in ("mm", "bmm"):  # an operand may be whole, like attention's keys
        for source in reversed(offered):
            rest = {other: axis for other, axis in offered.items() if other is not source}
            made = made or (rule(node, rest, tokens.count) if rest else None)
    return made
