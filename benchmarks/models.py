"""The models of the benchmarks: Qwen2.5-7B's width at any depth, random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# Of Qwen2.5-14B, 32B and 72B, and of examples/configs/120b.json, as arguments of `qwen2()`.
SHAPE_14B = {"width": 5120, "intermediate": 13824, "kv_heads": 8}
SHAPE_32B = {"width": 5120, "intermediate": 27648, "kv_heads": 8}
SHAPE_72B = {"width": 8192, "intermediate": 29568, "kv_heads": 8}
SHAPE_120B = {"width": 10240, "intermediate": 35840, "kv_heads": 8}


def qwen2(
    layers: int,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    width: int = 3584,
    vocabulary: int = 152064,
    intermediate: int | None = None,
    kv_heads: int | None = None,
) -> nn.Module:
    """`layers` of Qwen2.5-7B's width and vocabulary: 12 are 3.89 B parameters, 28 are 7.6 B."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=width,
        intermediate_size=intermediate or (18944 if width == 3584 else 4 * width),
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=kv_heads or (4 if width == 3584 else 1),
        vocab_size=vocabulary,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def unwritten_qwen2(layers: int, **shape: Any) -> nn.Module:
    """The same in host memory that was never written to, so that it takes none yet: for models that
    no GPU can hold. `write` gives it values when its memory is where it stays.

    Args:
        shape: what `qwen2` takes, beside the device.
    """
    model = qwen2(layers, device="meta", **shape).to_empty(device="cpu")
    backbone: Any = model.model
    backbone.rotary_emb = type(backbone.rotary_emb)(model.config)  # its frequencies, on the CPU
    return model


@torch.no_grad()
def write(model: nn.Module, device: str = "cuda", *, seed: int = 0) -> None:
    """Random values, made on the device, as transformers draws them: norms are 1, biases 0. Of a
    model that ranks share, each writes its shards.

    Args:
        seed: one for each rank.
    """
    torch.manual_seed(seed)
    for name, param in model.named_parameters():
        mine = param.to_local() if isinstance(param, DTensor) else param
        if param.ndim == 1:
            mine.copy_(torch.full_like(mine, 0.0 if name.endswith("bias") else 1.0))
        else:
            value = torch.empty(mine.shape, dtype=mine.dtype, device=device)
            mine.copy_(value.normal_(0.0, 0.02))


class Loss(nn.Module):
    """A causal language model that returns its loss alone: (batch, length) ids -> ()."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def to_float8(model: nn.Module, recipe: str) -> None:
    """Train the linear layers in float8, but for the head, as torchao does it.

    Args:
        model: a `Loss`.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda _, name: "lm_head" not in name,
    )


def tokens(batch: int, length: int, vocabulary: int = 152064) -> torch.Tensor:
    """Random token ids (batch, length), int64, on the GPU."""
    return torch.randint(0, vocabulary, (batch, length), device="cuda")


def parameters(model: nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(p.numel() for p in model.parameters())
