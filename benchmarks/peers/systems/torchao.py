"""torchao's `CPUOffloadOptimizer`: parameters on the GPU, the optimizer and its states on the CPU.

Each gradient is copied to the host as soon as the backward has made it and is freed then, so that
the norm of all of them is never there to clip by. The update runs on the CPU, by torch's fused
AdamW. It has no parameter offload: a model must fit beside its largest gradients.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.peers.system import System, layers, loop, module, recompute_layers
from benchmarks.peers.work import LEARNING_RATE, WEIGHT_DECAY


def setup(model: nn.Module, device: str) -> System:
    """Train a `Loss`, each layer compiled and recomputed.

    Args:
        model: in host memory, bf16.
        device: "cuda".
    """
    optim: Any = module("torchao.optim")
    model.to(device)
    recompute_layers(model)
    for layer in layers(model):
        layer.compile()
    optimizer = optim.CPUOffloadOptimizer(
        model.parameters(), offload_gradients=True, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY
    )
    return System(loop(model, optimizer, clips=False))
