"""Tensors of every kind, and buckets of them, for the tests of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megacompile.ir.buckets import Bucket


def odd_tensors() -> list[Tensor]:
    """Different shapes, dtypes and strides; a scalar and an empty one among them."""
    torch.manual_seed(0)
    return [
        torch.randn(33, 77),  # alone larger than a page
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0, 3),
        torch.arange(9, dtype=torch.int8),
    ]


def layout_of(tensors: Sequence[Tensor], key: int = 0) -> Bucket:
    """The bucket of some tensors, called p0, p1, ..."""
    return Bucket.layout(key, f"unit {key}", [(f"p{i}", t) for i, t in enumerate(tensors)])
