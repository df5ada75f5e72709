"""Attention in captured graphs: its arguments, and its mask."""

from __future__ import annotations

from typing import Any

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
