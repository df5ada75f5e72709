"""Give results the strides that what takes them was traced for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megacompile.ir.tensors import TensorMeta, dense, is_dense


def with_strides(
    function: Callable[..., Sequence[Any]], metas: Sequence[TensorMeta | None]
) -> Callable[..., list[Any]]:
    """The function, whose results have the strides of these metas.

    Inductor keeps the order of strides alone where a result is a view of what it has padded, such
    as a matrix product whose sides are no multiples of 8. A result that was traced as a view with
    gaps is left as it is.
    """
    wanted = [meta if meta and is_dense(meta, meta.stride) else None for meta in metas]

    def run(*inputs: Any) -> list[Any]:
        pairs = zip(function(*inputs), wanted, strict=True)
        return [
            value
            if meta is None or value.stride() == meta.stride
            else dense(value, meta.stride, meta.shape)
            for value, meta in pairs
        ]

    return run
