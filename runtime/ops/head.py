"""The code of the operators of `megacompile.ir.head`: loss and gradients in one pass over chunks of
rows.

    for each chunk:   z = x W^T + bias;   z <- d total / d z, in place;   dx = z W;   dW += z^T x

At any time there is one chunk of logits, in the dtype that `linear` returns them, and the
gradients. Those are float32 (float64 for float64): adding chunk after chunk to a bfloat16 gradient
would round it once a chunk.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megacompile.ir.head import OPERATOR, SCALE, empty_gradients, equal_chunks, sum_dtype
from megacompile.products import add_product
from megacompile.runtime.ops.cross_entropy import rows
from megacompile.runtime.ops.rows import Rows


@functools.cache
def bind_operators() -> None:
    """Give the operators of `megacompile.ir.head` their code, once."""
    torch.library.impl(OPERATOR, "default", _linear_cross_entropy)
    torch.library.impl(SCALE, "default", _scale)


@torch.no_grad()
def _linear_cross_entropy(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (C, H)
    bias: Tensor | None,  # (C,)
    target: Tensor,  # (N,) int64
    class_weight: Tensor | None,  # (C,)
    ignore_index: int,
    label_smoothing: float,
    chunk_rows: int,
    of_hidden: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wanted = (of_hidden, of_weight, of_bias)
    gradients = empty_gradients(hidden, weight, *wanted)
    for gradient in gradients:
        gradient.zero_()
    d_hidden, d_weight, d_bias = gradients
    total = hidden.new_zeros((), dtype=sum_dtype(hidden.dtype))
    chunk_rows = equal_chunks(hidden.shape[0], chunk_rows)
    buffer = hidden.new_empty(min(chunk_rows, hidden.shape[0]), weight.shape[0])
    for start in range(0, hidden.shape[0], chunk_rows):
        x = hidden[start : start + chunk_rows]
        logits = buffer[: x.shape[0]]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        chunk = Rows.of(logits, target[start : start + chunk_rows], class_weight, ignore_index)
        total += rows(chunk, label_smoothing, gradient=any(wanted))
        if of_hidden:
            add_product(d_hidden[start : start + chunk_rows], logits, weight)
        if of_weight:
            add_product(d_weight, logits.t(), x)
        if of_bias:
            d_bias += logits.sum(0, dtype=d_bias.dtype)
    return total, d_hidden, d_weight, d_bias


@torch.no_grad()
def _scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))
