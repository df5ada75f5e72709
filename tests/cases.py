"""The models whose numbers are compared with the plain ones, each with inputs: `build(name)`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import WIDTH, Block, hf_gpt2, hf_qwen2


@dataclass(frozen=True)
class Case:
    """A model, and a function that calls it on step `i`'s data and gives the loss."""

    model: nn.Module
    loss: Callable[[nn.Module, int, torch.device], Tensor]


def build(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def _ids(step: int, device: torch.device) -> Tensor:  # (2, 12) int64
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 64, (2, 12), generator=generator).to(device)


def _floats(step: int, device: torch.device, *size: int) -> Tensor:
    generator = torch.Generator().manual_seed(200 + step)
    return torch.randn(*size, generator=generator).to(device)


def _on_tokens(model: nn.Module) -> Case:
    """A model called as `model(ids, targets) -> (logits, loss)`."""

    def loss(m: nn.Module, step: int, device: torch.device) -> Tensor:
        ids = _ids(step, device)
        return m(ids, ids.roll(-1, 1))[1]

    return Case(model, loss)


def demo() -> ModuleType:
    """examples/train_lm.py as a module."""
    path = Path(__file__).parent.parent / "examples" / "train_lm.py"
    if "train_lm" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_lm", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["train_lm"] = module
        spec.loader.exec_module(module)
    return sys.modules["train_lm"]


class Decoder(nn.Module):
    """An embedding, blocks and a head; the variants of the tests are made of it."""

    def __init__(
        self,
        *,
        depth: int = 3,
        dropout: float = 0.0,
        tied: bool = False,
        shared: bool = False,
        breaks: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.shared = shared
        self.breaks = breaks

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)  # (batch, length, width)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.breaks and i == 1:
                torch.compiler.is_compiling() and print(end="")  # print breaks the graph
        if self.shared:
            x = self.blocks[0](self.blocks[1](x))
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _gpt() -> Case:
    return _on_tokens(demo().GPT(layers=3, width=32, heads=2, context=12))


def _huggingface(model: nn.Module) -> Case:
    def loss(m: nn.Module, step: int, device: torch.device) -> Tensor:
        ids = _ids(step, device)
        return m(input_ids=ids, labels=ids).loss

    return Case(model, loss)


def _qwen2() -> Case:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return _huggingface(hf_qwen2(**sizes, **heads, tie_word_embeddings=False))


def _gpt2() -> Case:
    return _huggingface(hf_gpt2(n_embd=32, n_layer=3))


def _batch_norm() -> Case:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()]

    def loss(m: nn.Module, step: int, device: torch.device) -> Tensor:
        return m(_floats(step, device, 8, 16)).square().mean()

    return Case(nn.Sequential(*layers, nn.Linear(16, 4)), loss)


def _frozen_half() -> Case:
    model = Decoder(depth=4)
    for module in (model.embed, *model.blocks[:2]):
        module.requires_grad_(False)
    return _on_tokens(model)


CASES: dict[str, Callable[[], Case]] = {
    "demo gpt": _gpt,
    "hf qwen2": _qwen2,
    "hf gpt2": _gpt2,
    "batch norm": _batch_norm,
    "graph break": lambda: _on_tokens(Decoder(breaks=True)),
    "tied": lambda: _on_tokens(Decoder(tied=True)),
    "shared layer": lambda: _on_tokens(Decoder(shared=True)),
    "frozen half": _frozen_half,
    "dropout": lambda: _on_tokens(Decoder(dropout=0.3)),
}
