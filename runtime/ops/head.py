"""Implements the operators of `megacompile.ir.head`: loss and gradients in one pass over chunks of
rows.

    for each chunk:   z = x W^T + bias;   z <- d total / d z, in place;   dx = z W;   dW += z^T x

At any time, only one chunk of logits (in the dtype that `linear` returns) and the gradients exist.
The gradients are float32 (float64 for float64): accumulating chunks into a bfloat16 gradient would
round once per chunk.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile import compat
from megacompile.ir.head import OPERATOR, SCALE, empty_gradients, equal_chunks, sum_dtype


@functools.cache
def bind_operators() -> None:
    """Register the implementations of the operators of `megacompile.ir.head`, once."""
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
        t = target[start : start + chunk_rows]
        options = (class_weight, ignore_index, label_smoothing)
        total += chunk_loss(logits, t, *options, gradient=any(wanted))
        if of_hidden:
            compat.add_product(d_hidden[start : start + chunk_rows], logits, weight)
        if of_weight:
            compat.add_product(d_weight, logits.t(), x)
        if of_bias:
            d_bias += logits.sum(0, dtype=d_bias.dtype)
    return total, d_hidden, d_weight, d_bias


@torch.no_grad()
def _scale(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


# Cross entropy of a chunk of logits; the gradient overwrites the logits in place.
#
#     loss  = sum_i a_i (lse_i - z_i[t_i]) + b_i (w lse_i - sum_c w_c z_i[c]),    w = sum_c w_c
#     dz_ic = (a_i + b_i w) exp(z_ic - lse_i) - b_i w_c - a_i [c = t_i]
#
# with a_i and b_i zero in ignored rows. On CUDA a Triton kernel reads each row twice and writes it
# once; `normalize_plain` does the same in plain torch.


@dataclass(frozen=True, slots=True)
class Rows:
    logits: Tensor  # (rows, C)
    target: Tensor  # (rows,) int64, 0 where ignored
    class_weight: Tensor | None  # (C,) in `sum_dtype`
    weight_sum: Tensor | float  # w of the formula


def chunk_loss(
    logits: Tensor,  # (rows, C)
    target: Tensor,  # (rows,) int64
    class_weight: Tensor | None,  # (C,)
    ignore_index: int,
    label_smoothing: float,
    *,
    gradient: bool,
) -> Tensor:
    """The loss summed over a chunk, (); with `gradient`, its gradient overwrites the logits."""
    dtype, classes, valid = sum_dtype(logits.dtype), logits.shape[1], target != ignore_index
    target = torch.where(valid, target, 0)
    if target.device.type == "cpu":  # on CUDA the gather below asserts it
        for wrong in target[(target < 0) | (target >= classes)][:1].tolist():
            raise IndexError(f"Target {wrong} is out of bounds.")  # torch's message
    weight = one = valid.to(dtype)
    chunk = Rows(logits, target, None, float(classes))
    if class_weight is not None:
        wide = class_weight.to(dtype)
        weight, chunk = wide[target] * one, Rows(logits, target, wide, wide.sum())
    a, b = weight * (1 - label_smoothing), one * (label_smoothing / classes)
    of_target = logits.gather(1, target[:, None])[:, 0].to(dtype)
    normalize, smooth = normalize_plain, label_smoothing != 0
    simple = dtype == torch.float32 and not (smooth and class_weight is not None)
    if logits.is_cuda and simple and importlib.util.find_spec("triton"):
        from megacompile.runtime.ops.cross_entropy_kernel import normalize_rows as normalize
    lse, weighted = normalize(chunk, a, b, smooth=smooth, gradient=gradient)
    losses = a * (lse - of_target)
    if weighted is not None:  # without smoothing a logit may be -inf: 0 * inf is not 0
        losses = losses + b * (chunk.weight_sum * lse - weighted)
    # a row with zero weight adds nothing, even NaN: cross_entropy skips ignored rows
    return torch.where(valid, losses, 0).sum()


def normalize_plain(
    chunk: Rows,
    a: Tensor,  # (rows,) in `sum_dtype`
    b: Tensor,  # (rows,) in `sum_dtype`
    *,
    smooth: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """lse, and with `smooth` the weighted sum of the logits, (rows,) each."""
    z = chunk.logits.to(a.dtype)
    lse = torch.logsumexp(z, 1)
    weighted = None
    if smooth:
        weighted = z.sum(1) if chunk.class_weight is None else z @ chunk.class_weight
    if gradient:
        z = z.sub_(lse[:, None]).exp_()  # a copy of the logits, or the logits themselves
        z.mul_((a + b * chunk.weight_sum)[:, None] if smooth else a[:, None])
        if smooth and chunk.class_weight is None:
            z.sub_(b[:, None])
        elif smooth:
            z.addr_(b, chunk.class_weight, alpha=-1)  # type: ignore[arg-type]
        z.scatter_add_(1, chunk.target[:, None], -a[:, None])
        if z is not chunk.logits:
            chunk.logits.copy_(z)
    return lse, weighted
