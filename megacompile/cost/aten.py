"""The kind of an ATen node, and the number of operations it takes.

Operations are counted as torch.utils.flop_counter does. Grouped products, of experts, are counted
here: each row meets the matrix of its own expert alone. A library that is told that attention is
causal skips half of it. Attention comes closer to its rate the longer its sequences are, and its
backward adds up the queries' gradients in float32, in memory of its own (Dao, FlashAttention-2,
2023, arXiv 2307.08691, algorithm 2).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megacompile import compat
from megacompile.ir.head import equal_chunks

_VIEWS = set(
    "view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice select alias "
    "detach as_strided split split_with_sizes unbind diagonal view_as unfold lift_fresh".split()
)
REDUCTIONS = set(
    "sum mean amax amin max min argmax argmin prod var var_mean std any all logsumexp norm "
    "cumsum _softmax _log_softmax native_layer_norm native_group_norm".split()
)
INDEXED = set("embedding gather index index_select _unsafe_index _unsafe_masked_index".split())
_SCATTERED = {  # which argument is written by an index
    "index_put": 2,
    "_unsafe_index_put": 2,
    "_unsafe_masked_index_put_accumulate": 3,
    "scatter": 3,
    "scatter_add": 3,
    "scatter_reduce": 3,
    "index_add": 3,
    "embedding_dense_backward": 0,
}
_FUSED = {"aten", "prims", "quantized_decomposed"}  # whose operators Inductor writes itself
LIBRARY = set("sort topk nonzero histc bincount masked_scatter native_dropout_backward".split())
_KEPT_NUMBERS = 1024  # of a row, while a kernel reduces it (Inductor's persistent reductions)
_MANY_COLUMNS = 8448  # Inductor splits the rows of fewer: 64 for each of 132 multiprocessors
_ALL_COLUMNS = 95000  # that take all of memory's rate: 18944 took 0.8 and 1.0 of 4.8 TB/s (H200)

# Instructions for a number, fitted to kernels of gated MLPs on an H200: with silu and fp8 casts in
# them they run at the rate of these, within a quarter, and not at that of memory.
_SLOW = set(
    "exp exp2 expm1 log log2 log10 log1p reciprocal sigmoid tanh erf sin cos rsqrt sqrt silu gelu "
    "softplus logit atan atan2 _softmax _log_softmax".split()
)
_SLOW_INSTRUCTIONS = 12
_CLAMP_INSTRUCTIONS = 2  # NaN stays NaN
_CAST8_INSTRUCTIONS = 4


def name_of(node: fx.Node) -> str:
    """Name of an overload packet, "mm"; of anything else as it prints itself."""
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", node.target))


def is_attention(node: fx.Node) -> bool:
    """True for attention of the forms (batch, heads, length, width): what others take is not known
    by their names."""
    of_aten = getattr(node.target, "namespace", None) == "aten"
    return of_aten and "scaled_dot_product" in name_of(node)


def is_product(node: fx.Node) -> bool:
    """True if it is a matrix product, or a convolution."""
    return getattr(node.target, "overloadpacket", None) in flop_registry or "mm" in name_of(node)


def is_grouped(node: fx.Node) -> bool:
    """True if it is a product of groups of rows with a matrix each: `grouped_mm`, and what stands
    in for it where there is no kernel (`transformers::grouped_mm_fallback`)."""
    return "grouped_mm" in name_of(node)


def is_view(node: fx.Node) -> bool:
    """True if it returns memory that was there before."""
    return name_of(node) in _VIEWS or node.target is operator.getitem


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that it returns, fake."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors, each whole."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)


def flops_of(node: fx.Node) -> int:
    """Operations of a matrix product or of attention; 0 for what is neither."""
    if is_attention(node):
        return _attention_flops(node)
    if is_grouped(node):
        return _grouped_flops(node)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return _unregistered_flops(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def instructions_of(node: fx.Node) -> int:
    """Operations of an elementwise node, or of a reduction: for all numbers that it takes or
    returns."""
    sizes = (t.numel() for n in (node, *node.all_input_nodes) for t in tensors_of(n))
    return max(sizes, default=0) * _instructions_a_number(node)


def _instructions_a_number(node: fx.Node) -> int:
    name = name_of(node)
    divides = name == "div" and isinstance(node.args[1], fx.Node)  # else it is a product
    if divides or name in _SLOW:
        return _SLOW_INSTRUCTIONS
    if name.startswith("clamp"):
        return _CLAMP_INSTRUCTIONS
    return _CAST8_INSTRUCTIONS if any(_is_fp8(t.dtype) for t in tensors_of(node)) else 1


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def itemsize_of(node: fx.Node) -> int:
    """Bytes of a number that a product multiplies: 1 where both factors are fp8, 2 where anything
    that it takes has 16 bits, else 4."""
    factors = [t.dtype for n in node.args[:2] if isinstance(n, fx.Node) for t in tensors_of(n)]
    if factors and all(map(_is_fp8, factors)):
        return 1
    taken = (tensor.dtype for n in node.all_input_nodes for tensor in tensors_of(n))
    return 2 if any(dtype in (torch.bfloat16, torch.float16) for dtype in taken) else 4


def _grouped_flops(node: fx.Node) -> int:
    """Operations of `a` (rows, k) and `b` (groups, k, n), or the forms of its backward: (groups,
    rows, k) with (k, n), and (m, rows) with (rows, n), which returns (groups, m, n).

    Rows of all groups together are as many as there are rows, however they are divided.
    """
    a, b = (tensors_of(n)[0] for n in node.args[:2] if isinstance(n, fx.Node))
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    products = 2 if _is_backward(node) else 1  # of the fallback: one op for both gradients
    return products * 2 * groups * math.prod(a.shape[-2:]) * b.shape[-1]


def _unregistered_flops(node: fx.Node) -> int:
    """Operations of a product that the registry does not know, such as one with packed weights:
    each number that it returns is a sum over the last dimension of what it takes first."""
    found = _operands(node)
    return 2 * found[-1].numel() * found[0].shape[-1] if found else 0


def _operands(node: fx.Node) -> list[torch.Tensor]:
    """All that a product takes, (.., k) first, and what it returns, (.., n); empty for no
    product."""
    each = [tensors_of(source) for source in node.all_input_nodes]
    given = tensors_of(node)[:1]
    if not is_product(node) or not given or not each or not each[0] or not each[0][0].dim():
        return []
    return [*(tensor for tensors in each for tensor in tensors), *given]


def _attention_flops(node: fx.Node) -> int:
    """Operations of attention of the forms (batch, heads, length, width); backward: with the
    forward's products again."""
    query, key, value = (tuple(tensor.shape) for tensor in _attended(node))
    heads = (*query[:2],)
    key, value = (*heads, *key[2:]), (*heads, *value[2:])  # grouped heads are read, not saved
    if _is_backward(node):
        flops = sdpa_backward_flop_count(query, query[:3] + value[3:], key, value)
    else:
        flops = sdpa_flop_count(query, key, value)
    return int(flops) // 2 if _is_causal(node) else int(flops)


def _is_causal(node: fx.Node) -> bool:
    return bool(dict(compat.arguments_of(node)).get("is_causal"))


_HALF_RATE_LENGTH = 900  # of attention: between 1024 and 131072 tokens on an H200


def reached_rate(node: fx.Node) -> float:
    """The share of the rate of long sequences that attention reaches."""
    length = int(_attended(node)[0].shape[-2])
    return length / (length + _HALF_RATE_LENGTH)


def workspace_bytes(node: fx.Node) -> int:
    """Memory inside of a library call."""
    if is_attention(node):
        return 4 * math.prod(_attended(node)[0].shape) if _is_backward(node) else 0
    if node.target is torch.ops.megacompile.linear_cross_entropy.default:
        return _logits_bytes(node)
    return unpacked_bytes(node)


def _logits_bytes(node: fx.Node) -> int:
    """Bytes of a chunk of a head's logits, which exist for as long as it is computed."""
    hidden, weight = (tensors_of(n)[0] for n in node.args[:2] if isinstance(n, fx.Node))
    at_most = dict(compat.arguments_of(node))["chunk_rows"]
    rows = min(equal_chunks(hidden.shape[0], at_most), hidden.shape[0])
    return rows * weight.shape[0] * hidden.dtype.itemsize


def unpacked_bytes(node: fx.Node) -> int:
    """Bytes of the unpacked weights that a product with packed ones makes, whole, before it begins.

    It is a product (.., k) to (.., n) that the registry does not know, none of whose inputs has the
    n x k numbers of its weights: that of bitsandbytes, with more than 1536 rows.
    """
    found = _operands(node)
    known = getattr(node.target, "overloadpacket", None) in flop_registry or is_grouped(node)
    if known or not found or not found[-1].dim():
        return 0
    first, *others, result = found
    numel = first.shape[-1] * result.shape[-1]
    whole = any(math.prod(tensor.shape) == numel for tensor in others)
    return 0 if whole else numel * result.dtype.itemsize


def _attended(node: fx.Node) -> list[torch.Tensor]:
    """Query, key and value of an attention; a backward takes the gradient before them."""
    start = 1 if _is_backward(node) else 0
    inputs = [a for a in node.args[start : start + 3] if isinstance(a, fx.Node)]
    return [tensors_of(n)[0] for n in inputs]


def _is_backward(node: fx.Node) -> bool:
    return "backward" in name_of(node)


def is_library(node: fx.Node) -> bool:
    """True if it is a call of a library, or a kernel that Inductor does not fuse."""
    return is_called(node) or scatters(node)


def is_called(node: fx.Node) -> bool:
    """True if it is a call of a library, or of an opaque operator of another package."""
    known = is_product(node) or is_attention(node) or name_of(node) in LIBRARY
    return known or getattr(node.target, "namespace", "aten") not in _FUSED


def scatters(node: fx.Node) -> bool:
    """True if it writes into memory by an index, other than into a constant.

    `scatter(full(...), index, value)` is a comparison with the index.
    """
    if name_of(node) not in _SCATTERED:
        return False
    base = node.args[0]
    constant = (
        name_of(node) == "scatter"
        and isinstance(base, fx.Node)
        and name_of(base) in ("full", "zeros", "scalar_tensor")
    )
    return not constant


def scattered_bytes(node: fx.Node) -> int:
    """Bytes that a scatter writes by its index, if that is a tensor and no number."""
    at = _SCATTERED.get(name_of(node))
    values = node.args[at] if at is not None and at < len(node.args) else None
    return bytes_of(tensors_of(values)) if isinstance(values, fx.Node) else 0


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a value, seen through views."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from readers_of(user)
        else:
            yield user


def reduces_to_one(node: fx.Node) -> bool:
    """True if a reduction makes one number of more than a row."""
    if name_of(node) not in REDUCTIONS:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    taken, given = tensors_of(source)[0], tensors_of(node)[0]
    return given.numel() == 1 and math.prod(taken.shape[:-1]) > 1


def reduces_long_rows(node: fx.Node) -> bool:
    """True if a reduction takes rows that are too long for a kernel to keep them."""
    if name_of(node) not in REDUCTIONS or reduces_to_one(node) or reduces_columns(node):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    taken, given = tensors_of(source)[0], tensors_of(node)[0]
    return taken.numel() > _KEPT_NUMBERS * given.numel()


def reduces_columns(node: fx.Node) -> bool:
    """True if a reduction keeps the last dimension, and so reads memory across its rows."""
    dims = node.args[1] if len(node.args) > 1 else None
    if name_of(node) not in REDUCTIONS or not isinstance(dims, (list, tuple)):
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = max(tensors_of(source)[0].dim(), 1)  # of no dimension: as of one
    return bool(dims) and all(isinstance(d, int) and d % rank != rank - 1 for d in dims)


def reached_in_columns(node: fx.Node) -> float:
    """The share of memory's rate that a reduction of columns reaches: where there are many, their
    rows are not split, and they alone run next to one another."""
    if not reduces_columns(node):
        return 1.0
    columns = tensors_of(node)[0].numel()
    return 1.0 if columns < _MANY_COLUMNS else min(1.0, columns / _ALL_COLUMNS)
