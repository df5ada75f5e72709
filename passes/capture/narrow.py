"""Restricts a head in chunks to the gradients that its graph uses.

    before: (loss, dx, dw, db) = linear_cross_entropy(..., True, True, True); return loss
    after:  (loss, -, -, -) = linear_cross_entropy(..., False, False, False); return loss

A forward and its backward are traced together, so the operator of `megacompile.ir.head` computes
gradients wherever it stands. A forward that saves nothing has no use for them.
"""

from __future__ import annotations

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.head import GRADIENTS


def narrow_heads(graph: fx.Graph) -> None:
    """Set the flags of each head in an ATen graph, in place."""
    head = torch.ops.megacompile.linear_cross_entropy.default
    for node in graph.find_nodes(op="call_function", target=head):
        used = {index for index, item in ops.items(node) if item.users}
        flags = node.args[-GRADIENTS:]
        now = tuple(flag and 1 + i in used for i, flag in enumerate(flags))
        node.args = (*node.args[:-GRADIENTS], *now)
        total, *gradients = node.meta["val"]
        of_each = zip(gradients, now, strict=True)
        node.meta["val"] = (total, *(g if wanted else g.new_empty(0) for g, wanted in of_each))
