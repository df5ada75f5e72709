"""Cross entropy of a chunk of logits, which become their own gradient in place.

    loss  = sum_i a_i (lse_i - z_i[t_i]) + b_i (w lse_i - sum_c w_c z_i[c]),    w = sum_c w_c
    dz_ic = (a_i + b_i w) exp(z_ic - lse_i) - b_i w_c - a_i [c = t_i]

with a_i and b_i zero in ignored rows. On CUDA a Triton kernel reads each row twice and writes it
once; its twin here is plain torch.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from megacompile.runtime.ops.rows import Rows


def rows(chunk: Rows, label_smoothing: float, *, gradient: bool) -> Tensor:
    """The loss's sum over a chunk, (); with `gradient`, the logits become its gradient."""
    a, b = chunk.coefficients(label_smoothing)
    # On CUDA gather checks the targets, which the kernel does not.
    of_target = chunk.logits.gather(1, chunk.target[:, None])[:, 0].to(a.dtype)
    smooth = label_smoothing != 0
    normalize = normalize_plain
    if chunk.logits.is_cuda and a.dtype == torch.float32 and importlib.util.find_spec("triton"):
        from megacompile.runtime.ops.cross_entropy_kernel import normalize_rows as normalize
    lse, weighted = normalize(chunk, a, b, smooth=smooth, gradient=gradient)
    losses = a * (lse - of_target)
    if weighted is not None:  # without smoothing a logit may be -inf: 0 * inf is not 0
        losses = losses + b * (chunk.weight_sum * lse - weighted)
    # a row of no weight counts nothing, whatever is in it: cross_entropy skips ignored rows
    return torch.where(chunk.valid, losses, 0).sum()


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
