"""DeepSpeed ZeRO-3 with parameters and optimizer on the CPU, and its own defaults beyond that.

Of 0.19's defaults, these matter here: host memory is page-locked, reduction overlaps the backward,
1e9 parameters may be live, 5e7 are fetched ahead, master weights and moments are float32, and steps
whose gradients overflow are skipped. Its CPU Adam is C++ that is compiled at first use.

`zero.Init` takes the parameters from the host; without it, `initialize` would move the whole model
to the device first, which a memory limit may forbid.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.group import group_of_one
from benchmarks.peers.system import System, buffers_to, module, recompute_layers
from benchmarks.peers.work import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY


def setup(model: nn.Module, device: str) -> System:
    """Train a `Loss`, each layer recomputed; by the process group that there is, or alone.

    Args:
        model: in host memory, bf16.
        device: "cuda" or "cpu".
    """
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    if not dist.is_initialized():
        group_of_one(device)
    deepspeed: Any = module("deepspeed")
    recompute_layers(model)
    adam = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    config = {
        "train_micro_batch_size_per_gpu": 1,  # counts sequences for its own reports alone
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP_NORM,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
    }
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    buffers_to(model, device)
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    return System(step, finish)
