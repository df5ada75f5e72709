"""A Triton kernel for cross entropy: softmax statistics of logits, and the gradient in their place.

    m, s  = max_c z_c, sum_c exp(z_c - m)    in one pass (Milakov and Gimelshein, 2018, "Online
    lse   = m + log s                         normalizer calculation for softmax")
    dz_c  = (a + b w) exp(z_c - lse) - b - a [c = t]       w: the number of classes

One program per row: it reads the row twice, the second time mostly from the L2 cache, and writes it
once. The twin is `normalize_plain` in runtime/ops/head.py. float32 arithmetic; logits
bf16, fp16 or fp32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from megacompile.runtime.optim.kernels import round_nearest

BLOCK = 8192  # classes per block
_WARPS = 16


def normalize_rows(
    chunk: Any,  # `runtime.ops.head.Rows`
    a: torch.Tensor,  # (rows,) fp32
    b: torch.Tensor,  # (rows,) fp32
    *,
    smooth: bool,
    gradient: bool,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """lse, and with `smooth` the sum of the logits, (rows,) fp32 each. With `gradient` the
    logits become their gradient."""
    logits = chunk.logits
    assert logits.stride(1) == 1, "rows of the chunk's own buffer"
    lse = torch.empty_like(a)
    weighted = torch.empty_like(a) if smooth else None
    scale = a + b * chunk.weight_sum if smooth else a
    device = logits.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        _normalize_rows[(logits.shape[0],)](
            logits,
            chunk.target,
            a,
            b,
            scale,
            lse,
            weighted,
            logits.stride(0),
            logits.shape[1],
            SMOOTH=smooth,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return lse, weighted


@triton.jit
def _normalize_rows(
    logits,  # (rows, classes)
    target,  # (rows,) int64
    a,
    b,
    scale,  # (rows,) fp32: a + b w
    lse,  # (rows,) fp32
    weighted,  # (rows,) fp32
    stride,
    classes,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    DTYPE: tl.constexpr = logits.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    z = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        index = start + lanes
        inside = index < classes
        x = tl.load(z + index, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(new == float("-inf"), 0.0, new)  # a block with only -inf: avoid NaN
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = new
        if SMOOTH:
            sums += tl.where(inside, x, 0.0)
    log_sum = largest + tl.log(total)
    tl.store(lse + row, log_sum)
    if SMOOTH:
        tl.store(weighted + row, tl.sum(sums, 0))
    if GRADIENT:
        here = tl.load(target + row)
        of_target = tl.load(a + row)
        of_class = tl.load(b + row)
        factor = tl.load(scale + row)
        for start in range(0, classes, BLOCK):
            index = start + lanes
            inside = index < classes
            x = tl.load(z + index, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = factor * tl.exp(x - log_sum)
            if SMOOTH:
                gradient -= of_class
            gradient = tl.where(index == here, gradient - of_target, gradient)
            rounded = round_nearest(gradient, DTYPE)
            tl.store(z + index, rounded, mask=inside)
