"""Small models for the tests of `plan`: configs as transformers writes them, and functions."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

CONFIG: dict[str, Any] = {  # of a model with two layers
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


# What a command's TARGET may name: `tests.configs:tower`.


def tower(batch: int, seq: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two layers that get floats."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    return model, (torch.empty(batch * seq, 16),)


class Words(nn.Module):
    """Layers of 64 KiB behind an embedding, and their loss."""

    def __init__(self, *, width: int = 64, layers: int = 6, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
                for _ in range(layers)
            )
        )
        self.adapter = nn.Linear(width, width)
        if frozen:
            self.layers.requires_grad_(False)
            self.embedding.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.adapter(self.layers(self.embedding(tokens))).square().mean()


def frozen() -> nn.Module:
    """Of which the last layer alone is trained."""
    return Words(frozen=True)


def long() -> nn.Module:
    """More layers, so that none of them is most of the model."""
    return Words(layers=12)


def fixed() -> tuple[nn.Module, list[Tensor], dict[str, Any]]:
    """Takes no sizes."""
    return nn.Linear(16, 16), [torch.empty(4, 16)], {}


def in_float8(recipe: str) -> nn.Module:
    """A language model in bfloat16; with a recipe, its layers are torchao's in float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from transformers import AutoConfig, AutoModelForCausalLM

    from megacompile.cli.target import LossAlone

    wide = {"hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 512}
    config = AutoConfig.for_model("qwen2", **wide, **heads)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if recipe:
        convert_to_float8_training(model.model, config=Float8LinearConfig.from_recipe_name(recipe))
    return LossAlone(model)


bf16, tensorwise, rowwise, rowwise_with_gw_hp = (
    functools.partial(in_float8, recipe)
    for recipe in ("", "tensorwise", "rowwise", "rowwise_with_gw_hp")
)


def nothing() -> int:
    return 3


def broken() -> nn.Module:
    raise ValueError("no such\nthing")


def recurrent() -> nn.Module:
    """Of which Dynamo captures nothing."""
    return nn.Sequential(nn.Embedding(32, 8), nn.LSTM(8, 8))


def breaking() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model that cannot be called so."""
    return nn.Linear(16, 16), (torch.empty(4, 15),)
