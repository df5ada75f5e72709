"""Attention in captured graphs: its arguments, and its mask."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask that an attention takes."""
    if node.target is not F.scaled_dot_product_attention:
        return None
    bound = bound_of(node)
    mask = bound.get("attn_mask")
    return mask if isinstance(mask, fx.Node) and bound.get("is_causal", False) is False else None


def bound_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an attention by name."""
    return dict(zip(_ATTENTION, node.args, strict=False)) | dict(node.kwargs)


def set_mask(node: fx.Node, *, causal: bool) -> None:
    """Removes the mask of an attention."""
    bound = bound_of(node) | {"attn_mask": None, "is_causal": causal}
    node.args = tuple(bound.pop(name) for name in _ATTENTION[:3])
    node.kwargs = bound


# The operators that build attention masks, by their names in captured graphs.

# Pure functions of their arguments, methods by name. torch 2.11's Dynamo captures some operators as
# methods (`__eq__`).
COMPARES: dict[Any, Callable[[Any, Any], Any]] = {
    **dict.fromkeys((operator.le, torch.le, "le", "__le__"), operator.le),
    **dict.fromkeys((operator.lt, torch.lt, "lt", "__lt__"), operator.lt),
    **dict.fromkeys((operator.ge, torch.ge, "ge", "__ge__"), operator.ge),
    **dict.fromkeys((operator.gt, torch.gt, "gt", "__gt__"), operator.gt),
    **dict.fromkeys((operator.eq, torch.eq, "eq", "__eq__"), operator.eq),
    **dict.fromkeys((operator.ne, torch.ne, "ne", "__ne__"), operator.ne),
}
ANDS = {
    *(operator.and_, torch.bitwise_and, torch.logical_and),
    *("bitwise_and", "logical_and", "__and__"),
}
ONES = {torch.ones, torch.ones_like, "new_ones"}
TRILS = {torch.tril, "tril"}
KEEP = {"to", "bool", "contiguous", "clone", torch.clone, "expand", "expand_as"}
RESHAPES = {"view", "reshape", "unsqueeze", torch.unsqueeze, torch.reshape}
MORE = {
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.floordiv, operator.getitem),
    *(torch.add, torch.sub, torch.arange, torch.diff, torch.cumsum, torch.zeros, torch.full),
    *("add", "sub", "diff", "cumsum", "new_zeros", "new_full", "long", "int", "squeeze", "size"),
    *("flatten", "cpu", "cuda", "__getitem__", "__add__", "__sub__", "__mul__", "__neg__"),
}
INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
PURE = {*COMPARES, *ANDS, *ONES, *TRILS, *KEEP, *RESHAPES, *MORE}
