"""Give results the strides that what takes them was traced for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megacompile.ir.tensors import TensorMeta, is_dense


def with_strides(
    function: Callable[..., Sequence[Any]], metas: Sequence[TensorMeta | None]
) -> Callable[..., list[Any]]:
    """The function, whose results have the strides of these metas.

    Inductor keeps the order of strides alone where a result is a view of what it has padded, such
    as a matrix product whose sides are no multiples of 8. A result that was traced as a view with
    gaps is left as it is.
    """
    dense = [meta if meta and is_dense(meta, meta.stride) else None for meta in metas]

    def run(*inputs: Any) -> list[Any]:
        pairs = zip(function(*inputs), dense, strict=True)
        return [
            value if meta is None or value.stride() == meta.stride else _laid_out(value, meta)
            for value, meta in pairs
        ]

    return run


def _laid_out(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor, or a copy of it, dense in the order of the strides of `meta`, of any size."""
    order = sorted(range(tensor.dim()), key=lambda d: (meta.stride[d], meta.shape[d]), reverse=True)
    expected = 1
    for d in reversed(order):
        if tensor.shape[d] != 1 and tensor.stride(d) != expected:
            return (
                tensor.permute(order).contiguous().permute([*map(order.index, range(len(order)))])
            )
        expected *= tensor.shape[d]
    return tensor
