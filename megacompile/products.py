"""Products of matrices that are added to a sum of a wider dtype."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool = False) -> None:
    """`total += a @ b`.

    Args:
        total: (M, N); of the dtype of `a` and `b`, or wider.
        a: (M, K).
        b: (K, N).
        first: `total = a @ b`: what is there is not read, and may be anything.
    """
    beta = 0 if first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta)
    elif a.device.type == "cpu":  # half matrices are slow there anyway
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)
    elif _adds_to_wider(a.device, a.dtype):
        addmm: Any = torch.addmm
        addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)  # rounded each time


@functools.cache
def _adds_to_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """True if addmm adds a product of halves to a float32 matrix in place, or writes it there, and
    gets it right.

    Documented for CUDA since torch 2.8; tried once, because not every backend has it.
    """
    addmm: Any = torch.addmm
    total = torch.full((16, 16), 1.0, device=device)
    factor = torch.full((16, 16), 1 / 1024, dtype=dtype, device=device)
    empty = torch.full((16, 16), float("nan"), device=device)
    try:
        addmm(total, factor, factor, out_dtype=torch.float32, out=total)
        addmm(empty, factor, factor, beta=0, out_dtype=torch.float32, out=empty)
    except (RuntimeError, TypeError):
        return False
    product = 16 / 1024**2
    return bool((total == 1 + product).all() and (empty == product).all())  # 1.0 in halves
