"""Qwen2.5 of any size over a 4-bit base of bitsandbytes, built without its weights in full.

One random layer of each shape is quantized, and its packed bytes are copied to all others of that
shape: what is measured does not look at the values. The model is made on `meta` and filled layer by
layer, so that building takes no more memory than the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen2 model; the defaults are those of Qwen2.5-72B."""

    layers: int = 80
    hidden: int = 8192
    intermediate: int = 29568
    heads: int = 64
    kv_heads: int = 8
    vocabulary: int = 152064

    @property
    def linear_parameters(self) -> int:
        """Parameters of all layers' linear maps, which are quantized."""
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """Parameters of the head and of the embedding."""
        return self.hidden * self.vocabulary


def qwen2_nf4(shape: Shape, *, device: str, double_quant: bool = True) -> nn.Module:
    """The causal language model in bf16, on `device`, with an NF4 base, in training mode."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    patterns: dict[tuple[int, int], Any] = {}
    for parent, name, layer in list(_linear_layers(model.model.layers)):
        setattr(parent, name, _packed(layer, patterns, device, double_quant))
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.device.type == "meta":
                setattr(module, name, nn.Parameter(_random(param, device), requires_grad=False))
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)
    model.requires_grad_(False)
    result: nn.Module = model.train()
    return result


def with_lora(model: nn.Module, rank: int = 16) -> nn.Module:
    """The model with LoRA on all linear layers of its layers, in bf16, as PEFT makes it."""
    from peft import LoraConfig, get_peft_model

    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=rank, target_modules=projections, task_type="CAUSAL_LM")
    made: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(0)  # the same numbers on every device
    for name, param in made.named_parameters():
        if "lora_" in name:
            values = torch.randn(param.shape, generator=generator) * (0.02 if "_A" in name else 0)
            param.data = values.to(param.device, torch.bfloat16)
    result: nn.Module = made
    return result


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child


def _packed(layer: nn.Linear, patterns: dict[Any, Any], device: str, double_quant: bool) -> Any:
    """A Linear4bit in the place of a layer on `meta`, with a copy of its shape's pattern."""
    from bitsandbytes import functional
    from bitsandbytes import nn as bnb

    shape = (layer.out_features, layer.in_features)
    if shape not in patterns:
        maker = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator().manual_seed(shape[0] + shape[1])
        weight = torch.randn(shape[1], generator=generator).to(maker, torch.bfloat16) * 0.02
        shifts = torch.arange(shape[0], device=maker)[:, None] * 7919  # of the row, in each row
        columns = torch.arange(shape[1], device=maker)[None]
        weight = weight[(shifts + columns * (1 + shifts % 13)) % shape[1]]
        data, state = functional.quantize_4bit(
            weight, compress_statistics=double_quant, quant_type="nf4"
        )
        state.to(device)
        patterns[shape] = data.to(device), state
    data, state = patterns[shape]
    with torch.device("meta"):
        made = bnb.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=double_quant,
            quant_type="nf4",
        )
    state = copy.deepcopy(state)
    made.weight = bnb.Params4bit(
        data.clone(),
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=double_quant,
        quant_type="nf4",
        bnb_quantized=True,
        module=made,
    )
    made.quant_state = state
    if made.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().to(torch.bfloat16), requires_grad=False)
    return made


def _random(like: torch.Tensor, device: str) -> torch.Tensor:
    """Ones for a norm, else small random numbers; those of a bias are zero."""
    if like.dim() == 1:
        return torch.ones_like(like, device=device)
    made = torch.empty_like(like, device=device)
    generator = torch.Generator().manual_seed(like.shape[0])
    rows = torch.randn(256, like.shape[1], generator=generator).mul_(0.02).to(device, like.dtype)
    for first in range(0, like.shape[0], 256):  # the values do not matter, the time does
        part = made[first : first + 256]
        part.copy_(rows[: part.shape[0]].roll(first // 256, 1))
    return made
