"""FSDP2 in one process: `fully_shard` on each layer, resident or with `CPUOffloadPolicy`.

With float32 parameters it computes in bf16 by `MixedPrecisionPolicy`. A process group of one has no
other rank to gather from; with offload, parameters come from the host all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.peers.group import group_of_one
from benchmarks.peers.system import System, adamw, buffers_to, layers, loop, recompute_layers


def setup(model: nn.Module, device: str, *, offload: bool = False) -> System:
    """Train a `Loss`, each layer compiled; with `offload`, each layer recomputed too.

    Args:
        model: in host memory.
        device: "cuda" or "cpu".
        offload: parameters, gradients and states stay in page-locked host memory.
    """
    group_of_one(device)
    options: dict[str, Any] = {"mesh": init_device_mesh(device, (1,))}
    if any(parameter.dtype == torch.float32 for parameter in model.parameters()):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device == "cuda")
        recompute_layers(model)
        buffers_to(model, device)
    else:
        model.to(device)
    for layer in layers(model):
        layer.compile()
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return System(loop(model, adamw(model.parameters())))
