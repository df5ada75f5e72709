"""Classifies ATen nodes and counts their operations.

Operations are counted as torch.utils.flop_counter does. Grouped products of experts are counted
here: each row is multiplied only by its own expert's matrix. Libraries skip half of causal
attention. Attention gets closer to its peak rate with longer sequences, and its backward
accumulates the queries' gradients in float32, in additional memory (Dao, FlashAttention-2, 2023,
arXiv 2307.08691, algorithm 2).
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
_SCATTERED = {  # position of the argument that is written by an index
    "index_put": 2,
    "_unsafe_index_put": 2,
    "_unsafe_masked_index_put_accumulate": 3,
    "scatter": 3,
    "scatter_add": 3,
    "scatter_reduce": 3,
    "index_add": 3,
    "embedding_dense_backward": 0,
}
_FUSED = {"aten", "prims", "quantized_decomposed"}  # namespaces that Inductor generates code for
LIBRARY = set("sort topk nonzero histc bincount masked_scatter native_dropout_backward".split())
_MANY_COLUMNS = 8448  # with fewer, Inductor splits the rows: 64 for each of 132 multiprocessors
_ALL_COLUMNS = 95000  # that reach the full memory rate: 18944 reached 0.8 to 1.0 of 4.8 TB/s (H200)


def name_of(node: fx.Node) -> str:
    """Name of the overload packet, such as "mm", or else of the target; "" if the node calls
    nothing: a backward's placeholder may be called like an operator."""
    if node.op != "call_function":
        return ""
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", node.target))


def is_attention(node: fx.Node) -> bool:
    """True for ATen attention on (batch, heads, length, width); the arguments of other operators
    are unknown."""
    of_aten = getattr(node.target, "namespace", None) == "aten"
    return of_aten and "scaled_dot_product" in name_of(node)


def is_product(node: fx.Node) -> bool:
    """True for a matrix product or convolution."""
    return getattr(node.target, "overloadpacket", None) in flop_registry or "mm" in name_of(node)


def is_grouped(node: fx.Node) -> bool:
    """True for a product of groups of rows with one matrix per group: `grouped_mm`, and its
    substitute without a kernel (`transformers::grouped_mm_fallback`)."""
    return "grouped_mm" in name_of(node)


def is_view(node: fx.Node) -> bool:
    """True if the node returns memory of its inputs."""
    return name_of(node) in _VIEWS or node.target is operator.getitem


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that the node returns."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors, ignoring shared memory."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)


def flops_of(node: fx.Node) -> int:
    """Operations of a matrix product or of attention; 0 for other nodes."""
    if is_attention(node):
        return _attention_flops(node)
    if is_grouped(node):
        return _grouped_flops(node)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:  # packed weights: sums over the last dimension of the first operand
        found = _operands(node)
        return 2 * found[-1].numel() * found[0].shape[-1] if found else 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def itemsize_of(node: fx.Node) -> int:
    """Bytes of an element in a product: 1 if both factors are fp8, 2 if any input has 16 bits, else
    4."""
    factors = [t.dtype for n in node.args[:2] if isinstance(n, fx.Node) for t in tensors_of(n)]
    if factors and all(dtype.is_floating_point and dtype.itemsize == 1 for dtype in factors):
        return 1
    taken = (tensor.dtype for n in node.all_input_nodes for tensor in tensors_of(n))
    return 2 if any(dtype in (torch.bfloat16, torch.float16) for dtype in taken) else 4


def _grouped_flops(node: fx.Node) -> int:
    """Operations of `a` (rows, k) with `b` (groups, k, n), or of its backward: (groups, rows, k)
    with (k, n), and (m, rows) with (rows, n), which returns (groups, m, n).

    The count does not depend on how rows are divided into groups.
    """
    a, b = (tensors_of(n)[0] for n in node.args[:2] if isinstance(n, fx.Node))
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    products = 2 if _is_backward(node) else 1  # the fallback's backward: one op for both gradients
    return products * 2 * groups * math.prod(a.shape[-2:]) * b.shape[-1]


def _operands(node: fx.Node) -> list[torch.Tensor]:
    """The inputs of a product, (.., k) first, and its result (.., n); [] if the node is not
    a product."""
    each = [tensors_of(source) for source in node.all_input_nodes]
    given = tensors_of(node)[:1]
    if not is_product(node) or not given or not each or not each[0] or not each[0][0].dim():
        return []
    return [*(tensor for tensors in each for tensor in tensors), *given]


def _attention_flops(node: fx.Node) -> int:
    """Operations of attention on (batch, heads, length, width); a backward repeats the forward's
    products."""
    query, key, value = (tuple(tensor.shape) for tensor in _attended(node))
    heads = (*query[:2],)
    # grouped heads save memory, not operations
    key, value = (*heads, *key[2:]), (*heads, *value[2:])
    if _is_backward(node):
        flops = sdpa_backward_flop_count(query, query[:3] + value[3:], key, value)
    else:
        flops = sdpa_flop_count(query, key, value)
    causal = dict(compat.arguments_of(node)).get("is_causal")
    return int(flops) // 2 if causal else int(flops)


_HALF_RATE_LENGTH = 900  # of attention; fitted to 1024 to 131072 tokens on an H200


def reached_rate(node: fx.Node) -> float:
    """The rate of attention, as a share of its rate with long sequences."""
    length = int(_attended(node)[0].shape[-2])
    return length / (length + _HALF_RATE_LENGTH)


def workspace_bytes(node: fx.Node) -> int:
    """Memory that a library call allocates inside."""
    if is_attention(node):
        return 4 * math.prod(_attended(node)[0].shape) if _is_backward(node) else 0
    if node.target is not torch.ops.megacompile.linear_cross_entropy.default:
        return unpacked_bytes(node)
    hidden, weight = (tensors_of(n)[0] for n in node.args[:2] if isinstance(n, fx.Node))
    at_most = dict(compat.arguments_of(node))["chunk_rows"]
    rows = min(equal_chunks(hidden.shape[0], at_most), hidden.shape[0])  # of one chunk of logits
    return rows * weight.shape[0] * hidden.dtype.itemsize


def unpacked_bytes(node: fx.Node) -> int:
    """Bytes of the weights that a product with packed weights unpacks before it begins.

    Such a product, (.., k) to (.., n), is not in torch's registry of FLOP formulas, and none of its
    inputs has n x k elements. An example is bitsandbytes' product with more than 1536 rows.
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
    """Query, key and value of an attention; a backward's first argument is the gradient."""
    start = 1 if _is_backward(node) else 0
    inputs = [a for a in node.args[start : start + 3] if isinstance(a, fx.Node)]
    return [tensors_of(n)[0] for n in inputs]


def _is_backward(node: fx.Node) -> bool:
    return "backward" in name_of(node)


def is_library(node: fx.Node) -> bool:
    """True for a library call, or a kernel that Inductor does not fuse."""
    return is_called(node) or scatters(node)


def is_called(node: fx.Node) -> bool:
    """True for a call of a library or of another package's opaque operator."""
    known = is_product(node) or is_attention(node) or name_of(node) in LIBRARY
    return known or getattr(node.target, "namespace", "aten") not in _FUSED


def scatters(node: fx.Node) -> bool:
    """True if the node writes to memory by an index, except into a constant.

    `scatter(full(...), index, value)` is a comparison with the index.
    """
    base = node.args[0] if node.args else None
    constants = ("full", "zeros", "scalar_tensor")
    constant = isinstance(base, fx.Node) and name_of(base) in constants
    return name_of(node) in _SCATTERED and not (constant and name_of(node) == "scatter")


def scattered_bytes(node: fx.Node) -> int:
    """Bytes that a scatter writes by its index, if the values are a tensor and not a number."""
    at = _SCATTERED.get(name_of(node))
    values = node.args[at] if at is not None and at < len(node.args) else None
    return bytes_of(tensors_of(values)) if isinstance(values, fx.Node) else 0


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a value, looking through views."""
    for user in node.users:
        if user.op == "call_function" and is_view(user):
            yield from readers_of(user)
        else:
            yield user


def _reduced(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor that a reduction takes, and the one that it returns."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return tensors_of(source)[0], tensors_of(node)[0]


def reduces_to_one(node: fx.Node) -> bool:
    """True if a reduction reduces more than one row to one number."""
    if name_of(node) not in REDUCTIONS:
        return False
    taken, given = _reduced(node)
    return given.numel() == 1 and math.prod(taken.shape[:-1]) > 1


def reduces_columns(node: fx.Node) -> bool:
    """True if a reduction keeps the last dimension, and so reads memory across rows."""
    dims = node.args[1] if len(node.args) > 1 else None
    if name_of(node) not in REDUCTIONS or not isinstance(dims, (list, tuple)):
        return False
    rank = max(_reduced(node)[0].dim(), 1)  # 0-d counts as 1-d
    return bool(dims) and all(isinstance(d, int) and d % rank != rank - 1 for d in dims)


def reached_in_columns(node: fx.Node) -> float:
    """The share of the memory rate that a reduction of columns reaches. With many columns, Inductor
    does not split the rows, so only columns run in parallel."""
    if not reduces_columns(node):
        return 1.0
    columns = _reduced(node)[1].numel()
    return 1.0 if columns < _MANY_COLUMNS else min(1.0, columns / _ALL_COLUMNS)
