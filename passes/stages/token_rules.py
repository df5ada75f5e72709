"""Rules for operators that can run in tiles: their action on tokens.

    (node, the axes of operands, tokens) -> its action; None: not tokenwise

Rules depend only on the operator, never on the model. A rule is valid for any choice of the token
dimension: it states that a part of the result needs only that part of the operands, or that the
result is a sum over parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megacompile import compat
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
    """The meta of a node that returns one tensor of known size."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(type(n) is int for n in value.shape):
        return None
    return tuple(value.shape)


Rule = Callable[[fx.Node, Axes, int], Act | None]


def name_of(node: fx.Node) -> str:
    return compat.operator_name(node.target) if node.op == "call_function" else ""


def _of(node: fx.Node) -> dict[str, Any]:
    return dict(compat.arguments_of(node))


def _rank(node: fx.Node) -> int:
    shape = shape_of(node)
    assert shape is not None
    return len(shape)


def _aligned(
    operands: Sequence[fx.Node], axes: Axes, rank: int, tokens: int
) -> tuple[Axis, dict[fx.Node, Axis]] | None:
    """The token axis of the broadcast shape, and the cut axis of each operand."""
    found: Axis | None = None
    for node in operands:
        if node in axes:
            axis = axes[node]
            aligned = Axis(axis.dim + rank - _rank(node), axis.outer, axis.inner)
            if found is not None and aligned != found:
                return None
            found = aligned
    if found is None:
        return None
    cuts = {}
    for node in operands:
        shape = shape_of(node) or ()
        dim = found.dim - (rank - len(shape))
        if dim < 0 or (shape[dim] == 1 and found.size(tokens) != 1):
            if node in axes:
                return None
            continue  # broadcast over tokens
        if shape[dim] != found.size(tokens):
            return None
        cuts[node] = Axis(dim, found.outer, found.inner)
    return found, cuts


def pointwise(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    shape = shape_of(node)
    if shape is None:
        return None
    made = _aligned(node.all_input_nodes, axes, len(shape), tokens)
    if made is None or shape[made[0].dim] != made[0].size(tokens):
        return None
    return Act(made[1], ((Result.CUT, made[0]),))


def _along(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """A shape-preserving operation along other dimensions: a softmax."""
    dim = _of(node)["dim"] % max(1, _rank(node))
    act = pointwise(node, axes, tokens)
    return act if act is not None and act.axis is not None and act.axis.dim != dim else None


def _only(node: fx.Node, axes: Axes) -> tuple[fx.Node, Axis] | None:
    source = node.args[0]
    return (source, axes[source]) if isinstance(source, fx.Node) and source in axes else None


def _kept(source: fx.Node, axis: Axis, made: Axis) -> Act:
    return Act({source: axis}, ((Result.CUT, made),))


def _reshape(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    taken, shape = _only(node, axes), shape_of(node)
    if taken is None or shape is None:
        return None
    source, axis = taken
    made = reshaped(axis, shape_of(source) or (), shape)
    return None if made is None else _kept(source, axis, made)


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


def _permute(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    taken = _only(node, axes)
    if taken is None:
        return None
    source, axis = taken
    order = list(range(_rank(node)))
    if name_of(node) == "permute":
        order = [d % len(order) for d in _of(node)["dims"]]
    elif name_of(node) == "t":
        order.reverse()
    else:
        a, b = (_of(node)[key] % len(order) for key in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    return _kept(source, axis, Axis(order.index(axis.dim), axis.outer, axis.inner))


def _expand(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    taken, shape = _only(node, axes), shape_of(node)
    if taken is None or shape is None:
        return None
    source, axis = taken
    dim = axis.dim + len(shape) - _rank(source)
    if shape[dim] != axis.size(tokens):
        return None
    return _kept(source, axis, Axis(dim, axis.outer, axis.inner))


def _slice(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """A part of another dimension: the token axis stays, or shifts if the dimension is removed."""
    taken = _only(node, axes)
    if taken is None:
        return None
    source, axis = taken
    dim = _of(node)["dim"] % _rank(source)
    if dim == axis.dim:
        return None
    gone = _rank(source) - _rank(node)
    below = gone if dim < axis.dim else 0
    return _kept(source, axis, Axis(axis.dim - below, axis.outer, axis.inner))


def _split(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    taken = _only(node, axes)
    if taken is None:
        return None
    source, axis = taken
    if _of(node)["dim"] % _rank(source) == axis.dim:
        return None
    results = tuple((Result.CUT, axis) for _ in node.meta["val"])
    return Act({source: axis}, results, items=True)


def _all_cut(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """An operation along another dimension of operands of equal rank, all of which are cut."""
    rank = _rank(node)
    made = _aligned(node.all_input_nodes, axes, rank, tokens)
    if made is None or any(_rank(operand) != rank for operand in node.all_input_nodes):
        return None
    axis, cuts = made
    if len(cuts) < len(node.all_input_nodes) or _of(node)["dim"] % rank == axis.dim:
        return None
    return Act(cuts, ((Result.CUT, axis),))


def _reduce(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    taken = _only(node, axes)
    if taken is None:
        return None
    source, axis = taken
    rank, given = _rank(source), _of(node)
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    dims = [d % rank for d in dims] if rank else []
    pair = isinstance(node.meta.get("val"), (tuple, list))
    if axis.dim in dims:
        return Act({source: axis}, ((Result.SUM, None),)) if name_of(node) == "sum" else None
    below = 0 if given.get("keepdim") else sum(d < axis.dim for d in dims)
    made = Axis(axis.dim - below, axis.outer, axis.inner)
    results = ((Result.CUT, made),) * (len(node.meta["val"]) if pair else 1)
    return Act({source: axis}, results, items=pair)


def _mm(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    a, b = node.args[:2]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return _product(node, a, b, axes, Result.PRODUCT)


def _bmm(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    a, b = node.args[:2]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return _product(node, a, b, axes, Result.SUM)


def _product(node: fx.Node, a: fx.Node, b: fx.Node, axes: Axes, sums: Result) -> Act | None:
    """The rule for matrices in the last two dimensions, one or many."""
    rank, left, right = _rank(a), axes.get(a), axes.get(b)
    rows, columns = rank - 2, rank - 1
    if a is b:
        return None
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


def _addmm(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    bias, a, b = node.args[:3]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node) and isinstance(bias, fx.Node)
    if bias in axes or b in axes or a not in axes or axes[a].dim != 0:
        return None
    return Act({a: axes[a]}, ((Result.CUT, axes[a]),)) if _rank(bias) < 2 else None


def _scaled_mm(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """A product of fp8 factors: cut along rows of the first or columns of the second, with their
    scales. A sum over tokens is not supported, because scales may span all tokens."""
    given = _of(node)
    for key, scale_key, dim in (("self", "scale_a", 0), ("mat2", "scale_b", 1)):
        operand, scale, bias = given[key], given[scale_key], given.get("bias")
        axis = axes.get(operand)
        if axis is None or axis.dim != dim or (bias is not None and dim == 1):
            continue
        cuts, of_each = {operand: axis}, [1, 1]
        of_each[dim] = axis.size(tokens)
        shape = shape_of(scale)
        if shape is None or math.prod(shape) > 1 and list(shape) != of_each:
            continue  # of blocks
        if math.prod(shape) > 1:
            cuts[scale] = axis
        return Act(cuts, ((Result.CUT, axis),))
    return None


def _embedding(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    table, indices = node.args[:2]
    if not isinstance(indices, fx.Node) or indices not in axes or table in axes:
        return None
    return Act({indices: axes[indices]}, ((Result.CUT, axes[indices]),))


def _norm(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """A norm over the last dimensions: the result, and statistics of the same rank."""
    taken = _only(node, axes)
    if taken is None or any(n in axes for n in node.all_input_nodes if n is not taken[0]):
        return None
    source, axis = taken
    if axis.dim >= _rank(source) - len(_of(node)["normalized_shape"]):
        return None
    results = ((Result.CUT, axis),) * len(node.meta["val"])
    return Act({source: axis}, results, items=True)


def _norm_backward(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    given = _of(node)
    each = [given["grad_out"], given["input"], given.get("mean"), given.get("rstd")]
    operands = [n for n in each if isinstance(n, fx.Node)]
    made = _aligned(operands, axes, _rank(operands[0]), tokens)
    if made is None or made[0].dim >= _rank(operands[0]) - len(given["normalized_shape"]):
        return None
    if any(n in axes for n in node.all_input_nodes if n not in operands):
        return None
    kinds: Kinds = ((Result.CUT, made[0]), *((Result.SUM, None) for _ in node.meta["val"][1:]))
    return Act(made[1], kinds, items=True)


def _attention(node: fx.Node, axes: Axes, tokens: int) -> Act | None:
    """Attention of each sample alone, or its backward: (samples, heads, length, width)."""
    given = _of(node)
    axis = axes.get(given["query"])
    if axis is None or axis.dim != 0 or given.get("dropout_p"):
        return None
    mask = given.get("attn_mask", given.get("attn_bias"))
    cuts = {}
    for operand in node.all_input_nodes:
        shape = shape_of(operand) or ()
        if len(shape) < _OF_SAMPLES:  # seeds, and a mask of all heads of all samples
            continue
        if shape[0] == axis.size(tokens) and axes.get(operand, axis) == axis:
            cuts[operand] = axis
        elif operand is not mask or operand in axes:
            return None
    values = node.meta["val"]
    results = tuple(_of_samples(value, axis, tokens) for value in values)
    if name_of(node).endswith("_backward"):
        used = {user.args[1] for user in node.users}
        if any(axis is None for k, (_, axis) in enumerate(results) if k in used):
            return None  # the gradient of a mask shared by samples
    return Act(cuts, results, items=True)


_OF_SAMPLES = 3  # minimum rank of attention's per-sample operands and results


def _of_samples(value: Any, axis: Axis, tokens: int) -> tuple[Result, Axis | None]:
    """Cut along samples, or equal in all tiles: a seed."""
    is_cut = isinstance(value, torch.Tensor) and value.dim() >= _OF_SAMPLES
    return Result.CUT, axis if is_cut and value.shape[0] == axis.size(tokens) else None


RULES: dict[str, Rule] = {
    **dict.fromkeys("view _unsafe_view reshape unsqueeze squeeze".split(), _reshape),
    **dict.fromkeys("permute transpose t".split(), _permute),
    **dict.fromkeys("alias detach clone _to_copy convert_element_type".split(), pointwise),
    **dict.fromkeys("full_like zeros_like ones_like empty_like".split(), pointwise),
    **dict.fromkeys(
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data".split(), _along
    ),
    **dict.fromkeys("slice select".split(), _slice),
    **dict.fromkeys("split split_with_sizes unbind".split(), _split),
    **dict.fromkeys("sum mean amax amin var var_mean prod any all logsumexp".split(), _reduce),
    **dict.fromkeys("argmax argmin".split(), _reduce),
    **dict.fromkeys("native_layer_norm _fused_rms_norm".split(), _norm),
    **dict.fromkeys("native_layer_norm_backward _fused_rms_norm_backward".split(), _norm_backward),
    "expand": _expand,
    "cat": _all_cut,
    "slice_scatter": _all_cut,
    "mm": _mm,
    "bmm": _bmm,
    "addmm": _addmm,
    "_scaled_mm": _scaled_mm,
    "embedding": _embedding,
}

ATTENTION: dict[str, Rule] = {  # for tiles of whole samples
    f"_scaled_dot_product_{kind}{way}": _attention
    for kind in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
    for way in ("", "_backward")
}
