"""Each rank reads its rows of a checkpoint: `torchrun ... -m tests.rank_meta FOLDER`.

The model is built on meta. What a rank has then, and how much memory it took meanwhile, goes to
`FOLDER/RANK`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megacompile import megacompile
from tests.rank_modes import whole

WIDTH, DEPTH, WORDS = 1024, 40, 8191  # of which two ranks have unequal parts
MB = 10**6


class Large(nn.Module):
    """Some 200 MB: layers between an embedding and the head that is tied to it, and a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.arange(5.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        result: Tensor = self.head(x).mean()
        return result


def memory_bytes(what: str) -> int:
    """What this process takes (VmRSS), or the most that it has taken (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(what)


def load(folder: Path) -> dict[str, Any]:
    """Load, and look."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    megacompile(nn.Linear(4, 4), mesh=mesh, device="cpu")  # what is imported late
    with torch.device("meta"):
        model = Large()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = memory_bytes("VmRSS")
    megacompile(model, mesh=mesh, device="cpu", checkpoint=folder / "checkpoint")
    peak = memory_bytes("VmHWM") - before
    assert model.head.weight is model.embedding.weight
    params = {name: whole(param).clone() for name, param in model.named_parameters()}
    assert {type(param).__name__ for param in model.parameters()} == {"DTensor"}
    return {"peak": peak, "params": params, "mean": model.mean}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.save(load(folder), folder / os.environ["RANK"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
