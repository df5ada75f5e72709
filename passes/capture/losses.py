"""Compute losses in float32, whatever `compute_dtype` is.

    before: loss = cross_entropy(logits, y)          after: wide = logits.float()
                                                            loss = cross_entropy(wide, y)

A loss sums many small numbers. `torch.autocast` computes and returns losses in float32, on a GPU
`log_softmax` too (its list of ops that autocast to float32); so does this pass.
"""

from __future__ import annotations

import torch
from torch import fx

from megacompile.ir.capture import Capture
from megacompile.passes.capture.propagate import propagate

# Functions of torch.nn.functional, their callees, and methods, by name.
_LOSSES = {
    *("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
    *("gaussian_nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "ctc_loss"),
    *("soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss"),
    *("multilabel_soft_margin_loss", "triplet_margin_loss"),
}
_LOG_SOFTMAX = "log_softmax"


def widen_losses(capture: Capture, *, compute_dtype: torch.dtype) -> Capture:
    """The capture with losses whose inputs are never in `compute_dtype`; the same capture if
    nothing changes."""
    names = _LOSSES | ({_LOG_SOFTMAX} if capture.device.type == "cuda" else set())
    if not any(_is_loss(node, names) for node in capture.module.graph.nodes):
        return capture
    own = capture.fresh()
    values = propagate(own)
    for node in [n for n in own.module.graph.nodes if _is_loss(n, names)]:
        for given in dict.fromkeys(node.all_input_nodes):
            if getattr(values.of.get(given), "dtype", None) is compute_dtype:
                with own.module.graph.inserting_before(node):
                    wide = own.module.graph.call_method("float", (given,))
                wide.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
                node.replace_input_with(given, wide)
    return own


def _is_loss(node: fx.Node, names: set[str]) -> bool:
    """True for a function of torch without an explicit dtype."""
    method = isinstance(node.target, str)
    name = node.target if method else getattr(node.target, "__name__", "")
    if name not in names or node.op not in ("call_function", "call_method"):
        return False
    if name == _LOG_SOFTMAX:
        return node.kwargs.get("dtype") is None and len(node.args) <= 2
    module = getattr(node.target, "__module__", None) or "torch"
    return not method and module.split(".")[0] == "torch"
