"""Models on meta and their checkpoints, for the tests of loading and saving."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.ir.buckets import Bucket
from tests.zoo import Language


class Block(nn.Module):
    """A layer with buffers of both kinds, of which torch's modules initialize all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The buffer: the children have their own. It draws, and reading must not be seen to."""
        torch.arange(1, self.scale.numel() + 1, out=self.scale)
        torch.rand(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x) / self.scale).relu()
        return x + self.down(hidden)


class Net(Language):
    """Layers, with an embedding that the head is tied to."""

    def __init__(self, layers: int = 3, width: int = 8, words: int = 32, tied: bool = True) -> None:
        super().__init__(words, width, (Block(width) for _ in range(layers)), tied=tied)


def on_meta(make: Any = Net, **options: Any) -> Any:
    """A model without memory."""
    with torch.device("meta"):
        return make(**options)


def ids() -> torch.Tensor:
    """A batch of `Net`: (16,) int64."""
    return torch.arange(16) % 7


def saved(model: nn.Module, folder: Path, files: int = 1) -> Path:
    """A model's state dict as safetensors, each tensor once; sharded, with an index."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        kept.setdefault(id(value), name)
    named = {name: model.state_dict()[name].contiguous() for name in kept.values()}
    if files == 1:
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {}
    names = list(named)
    for k in range(files):
        file = f"model-{k + 1:05}-of-{files:05}.safetensors"
        part = names[k::files]
        places.update(dict.fromkeys(part, file))
        save_file({name: named[name] for name in part}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, those that are not persistent too; copies."""
    pairs = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in pairs}


def odd_tensors() -> list[Tensor]:
    """Different shapes, dtypes and strides; a scalar and an empty one among them."""
    torch.manual_seed(0)
    return [
        torch.randn(33, 77),  # alone larger than a page
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0, 3),
        torch.arange(9, dtype=torch.int8),
    ]


def layout_of(tensors: Sequence[Tensor], key: int = 0) -> Bucket:
    """The bucket of some tensors, called p0, p1, ..."""
    return Bucket.layout(key, f"unit {key}", [(f"p{i}", t) for i, t in enumerate(tensors)])
