"""A language model's head and its loss as one operator: its definition and its autograd formula.

    total = sum_i a_i (lse_i - z_i[t_i]) + b_i sum_c w_c (lse_i - z_i[c]),    z = x W^T + bias

over the rows i that are not ignored, with t the targets, w the class weights (1 without them),
lse_i = log sum_c exp z_i[c], a_i = (1 - smoothing) w[t_i] and b_i = smoothing / C: the sum that
`torch.nn.functional.cross_entropy` takes of `torch.nn.functional.linear`. The operator computes it
and its gradients in one pass over chunks of rows, and holds only one chunk of z. The gradients are
those of the total; the backward multiplies them by the gradient of the loss. This order also avoids
float16 underflow: the division of a mean over 65536 tokens happens together with the multiplication
by a loss scale. (The method is that of Liger-Kernel's fused linear cross entropy, Hsu et al.,
2024.)

The implementation is in `megacompile.runtime.ops.head`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from megacompile import compat
from megacompile.ir import ops

OPERATOR = "megacompile::linear_cross_entropy"

torch.library.define(
    OPERATOR,
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
    "int ignore_index, float label_smoothing, int chunk_rows, "
    "bool of_hidden, bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor)",
)

SCALE = "megacompile::scale"  # in one kernel, without a wide intermediate product

torch.library.define(SCALE, "(Tensor gradient, Tensor factor, ScalarType dtype) -> Tensor")

ALIGNED_ROWS = 128  # a tile of the matrix kernels

GRADIENTS = 3  # the operator's last flags: compute the gradient of hidden, weight, bias


def equal_chunks(rows: int, at_most: int) -> int:
    """Rows per chunk: for the fewest chunks that `at_most` allows, of equal size and whole tiles if
    possible. Idempotent: its result, passed as `at_most`, is returned."""
    equal = -(-rows // max(1, -(-rows // at_most)))
    return min(at_most, max(1, -(-equal // ALIGNED_ROWS)) * ALIGNED_ROWS)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums over rows and classes: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_gradients(
    hidden: Tensor, weight: Tensor, of_hidden: bool, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers in `sum_dtype` for the gradients of a total with respect to hidden, weight and bias;
    unneeded ones are empty. The gradients are rounded once, when they are scaled."""
    dtype = sum_dtype(hidden.dtype)
    shapes = (tuple(hidden.shape), tuple(weight.shape), tuple(weight.shape[:1]))
    of_each = zip(shapes, (of_hidden, of_weight, of_bias), strict=True)
    one, two, three = (
        hidden.new_empty(shape if wanted else (0,), dtype=dtype) for shape, wanted in of_each
    )
    return one, two, three


def _fake(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    total = hidden.new_empty((), dtype=sum_dtype(hidden.dtype))
    return total, *empty_gradients(hidden, weight, *rest[-GRADIENTS:])


torch.library.register_fake(OPERATOR, _fake)


def _flops(hidden: tuple[int, int], weight: tuple[int, int], *rest: Any, **_: Any) -> int:
    """Floating-point operations: of the logits, and of the gradients of hidden and weight."""
    of_hidden, of_weight, _bias = rest[-GRADIENTS:]
    products: int = 1 + of_hidden + of_weight
    return 2 * hidden[0] * hidden[1] * weight[0] * products


register_flop_formula(torch.ops.megacompile.linear_cross_entropy)(_flops)


torch.library.register_fake(SCALE, lambda grad, factor, dtype: torch.empty_like(grad, dtype=dtype))


def linear_cross_entropy(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (C, H), in hidden's dtype unless under autocast
    bias: Tensor | None,  # (C,)
    target: Tensor,  # as many as hidden has rows, int64
    class_weight: Tensor | None,  # (C,)
    *,
    ignore_index: int,
    label_smoothing: float,
    mean: bool,
    chunk_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` in chunks, a scalar of `dtype`.

    No chunk has more than `chunk_rows` rows, and their sizes are as equal as tiles allow.
    `mean`: averages over the targets other than `ignore_index`, by class weight; otherwise sums.
    Differentiable once, in hidden, weight and bias. Follows autocast as `linear` does.

    Raises:
        IndexError: a target is not a valid class (on CUDA, a device-side assertion).
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        hidden, weight = _autocast(hidden, low), _autocast(weight, low)
        bias = None if bias is None else _autocast(bias, low)
    rows = hidden.reshape(-1, hidden.shape[-1])
    compat.check(rows.shape[0] == target.numel())
    options = (ignore_index, label_smoothing, mean, chunk_rows, torch.is_grad_enabled())
    with torch.autocast(kind, enabled=False):
        loss: Tensor = _Loss.apply(rows, weight, bias, target.reshape(-1), class_weight, *options)  # type: ignore[no-untyped-call]
        return loss.to(dtype)


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as autocast casts it; it does not change float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        *options: Any,
    ) -> Tensor:
        ignore_index, label_smoothing, mean, chunk_rows, gradients = options
        wanted = [gradients and needed for needed in ctx.needs_input_grad[:GRADIENTS]]
        tensors = (rows, weight, bias, target, class_weight)
        numbers = (ignore_index, label_smoothing, chunk_rows)
        found: list[Tensor]
        total: Tensor
        total, *found = torch.ops.megacompile.linear_cross_entropy(*tensors, *numbers, *wanted)
        ctx.wanted, ctx.mean = wanted, mean
        ctx.dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        if not mean:
            ctx.save_for_backward(*found)
            return total
        valid: Tensor = target != ignore_index
        over = valid.sum().to(total.dtype)
        if class_weight is not None:
            over = class_weight[torch.where(valid, target, 0)].mul(valid).sum().to(total.dtype)
        ctx.save_for_backward(*found, over, valid.any())
        return total / over

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        found, rest = ctx.saved_tensors[:GRADIENTS], ctx.saved_tensors[GRADIENTS:]
        scale = grad.to(found[-1].dtype)
        if ctx.mean:
            over, any_valid = rest
            scale = torch.where(any_valid, scale / over, 0.0)  # as in torch: NaN has no gradient
        gradients = [
            torch.ops.megacompile.scale(gradient, scale, dtype) if wanted else None
            for gradient, dtype, wanted in zip(found, ctx.dtypes, ctx.wanted, strict=True)
        ]
        return (*gradients, *(None for _ in range(7)))


def narrow_heads(graph: fx.Graph) -> None:
    """Restrict each head in an ATen graph to the gradients that the graph uses, in place.

        before: (loss, dx, dw, db) = linear_cross_entropy(..., True, True, True); return loss
        after:  (loss, -, -, -) = linear_cross_entropy(..., False, False, False); return loss

    A forward and its backward are traced together, so the traced operator always computes
    gradients. A forward that saves nothing does not need them.
    """
    head = torch.ops.megacompile.linear_cross_entropy.default
    for node in graph.find_nodes(op="call_function", target=head):
        used = {index for index, item in ops.items(node) if item.users}
        flags = node.args[-GRADIENTS:]
        now = tuple(flag and 1 + i in used for i, flag in enumerate(flags))
        node.args = (*node.args[:-GRADIENTS], *now)
        total, *gradients = node.meta["val"]
        of_each = zip(gradients, now, strict=True)
        node.meta["val"] = (total, *(g if wanted else g.new_empty(0) for g, wanted in of_each))
