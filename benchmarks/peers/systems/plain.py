"""PyTorch as it is: everything on the device."""

from __future__ import annotations

from torch import nn

from benchmarks.models import to_float8
from benchmarks.peers.system import System, adamw, layers, loop, recompute_layers


def setup(
    model: nn.Module,
    device: str,
    *,
    compiled: bool = False,
    recompute: bool = False,
    float8: str | None = None,
) -> System:
    """Train a `Loss` on the device.

    Args:
        model: in host memory.
        device: "cuda" or "cpu".
        compiled: `torch.compile` on the whole, with `recompute` on each layer.
        recompute: each layer in the backward.
        float8: torchao's recipe for the linear layers but the head.
    """
    if float8:
        to_float8(model, float8)
    model.to(device)
    if recompute:
        recompute_layers(model)
        if compiled:
            for layer in layers(model):
                layer.compile()
    elif compiled:
        model.compile()
    return System(loop(model, adamw(model.parameters())))
