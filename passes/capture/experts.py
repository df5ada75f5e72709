"""Makes products of experts torch's own, as in an eager call of the model.

    before: transformers.grouped_mm_fallback(x, weight, offs)
    after:  megacompile.grouped_mm(x, weight, offs)

See `megacompile.compat.kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.ir.capture import Capture


def take_grouped_products(capture: Capture, device: torch.device) -> Capture:
    """The capture with torch's products of experts; itself where it has none of the others."""
    if not _others(capture.module.graph, device):
        return capture
    own = capture.fresh()
    for node, target in _others(own.module.graph, device):
        node.target = target
    own.module.recompile()
    return own


def _others(graph: fx.Graph, device: torch.device) -> list[tuple[fx.Node, Any]]:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    each = [(node, compat.eager_grouped_mm(node.target, device)) for node in calls]
    return [(node, target) for node, target in each if target is not None]
