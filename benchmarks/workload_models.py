"""Models that people train, by their shapes: no weights, no downloads.

Parameters are made on `meta`, then get memory on a device, and have no values until `models.write`:
a model of 30 B parameters is there in seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.nf4 import LINEAR, pack, with_lora
from benchmarks.workload_batches import (
    Batch,
    Draw,
    Sizes,
    images_and_texts,
    latents_and_texts,
    prompts,
    texts,
)

_TEXT_KEYS = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}

QWEN3_8B = {
    **_TEXT_KEYS,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
QWEN3_1_7B = {
    **_TEXT_KEYS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    **_TEXT_KEYS,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
QWEN2_5_VL_7B: dict[str, Any] = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
}
FLUX: dict[str, Any] = {"guidance_embeds": True}  # the defaults of diffusers are the rest

# What is smaller with `--tiny`.
_TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
_TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_TINY_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TINY_SIGHT = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
_TINY_VL: dict[str, Any] = {
    "text_config": {**_TINY_TEXT, "rope_parameters": _TINY_ROPE},
    "vision_config": {**_TINY_SIGHT, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
    "image_token_id": 252,
    "video_token_id": 253,
    "vision_start_token_id": 254,
    "vision_end_token_id": 255,
}
_TINY_FLUX: dict[str, Any] = {
    "num_layers": 1,
    "num_single_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (8, 12, 12),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model as people train it."""

    kind: str  # in transformers; "flux" in diffusers
    shape: Mapping[str, Any]
    tiny: Mapping[str, Any]  # takes the place of the shape's
    sizes: Sizes
    lora: tuple[str, ...] = ()  # the names of the layers with adapters; none: all is trained
    nf4: bool = False  # are linear layers and experts in 4 bits?
    draw: Draw = texts
    needs: tuple[str, ...] = ("transformers",)  # packages
    tiny_sizes: Sizes = Sizes(rows=2, tokens=24)

    def build(self, device: str, *, tiny: bool) -> nn.Module:
        """The model in bf16 without values, except for quantized ones, on `device`."""
        shape = {**self.shape, **(self.tiny if tiny else {})}
        made: Any
        with mock.patch.object(nn.Module, "register_parameter", _register_on_meta):
            if self.kind == "flux":
                made = importlib.import_module("diffusers").FluxTransformer2DModel(**shape)
                made = made.to(torch.bfloat16)
            else:
                library = importlib.import_module("transformers")
                config = library.AutoConfig.for_model(self.kind, **shape)
                seeing = self.kind == "qwen2_5_vl"
                name = "AutoModelForImageTextToText" if seeing else "AutoModelForCausalLM"
                made = getattr(library, name).from_config(config, dtype=torch.bfloat16)
        if self.nf4:
            pack(made, made.model.layers, device)
        _give_memory(made, device)
        made.to(device)  # buffers
        if self.lora:
            with_lora(made, targets=self.lora, task=None if self.kind == "flux" else "CAUSAL_LM")
        loss = FlowLoss(made) if self.kind == "flux" else TextLoss(made)
        return made.train() if self.sizes.new_tokens else loss.train()

    def batch(self, k: int, *, tiny: bool) -> Batch:
        """The batch of step k, on the CPU; that of step 0 is as large as any."""
        sizes = self.tiny_sizes if tiny else self.sizes
        shape = {**self.shape, **(self.tiny if tiny else {})}
        return self.draw(k, sizes, shape)


_register = nn.Module.register_parameter


def _register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Register a parameter without memory; one that is registered a second time stays the same."""
    if param is not None and param.device.type != "meta":
        param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
    _register(module, name, param)


def _give_memory(model: nn.Module, device: str) -> None:
    """Give parameters on `meta` memory on the device, without values."""
    given: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param.device.type == "meta":
                if param not in given:
                    memory = torch.empty_like(param, device=device)
                    given[param] = nn.Parameter(memory, requires_grad=param.requires_grad)
                setattr(module, name, given[param])


class TextLoss(nn.Module):
    """A model of transformers that returns its loss alone, so that its head can be in chunks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss


class FlowLoss(nn.Module):
    """The flow-matching loss of a transformer: it predicts noise - latents from a mix of both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        latents: Tensor,  # (batch, tokens, channels) bf16, as is the noise
        noise: Tensor,
        time: Tensor,  # (batch,) bf16, from 0 (latents) to 1 (noise)
        **told: Tensor,
    ) -> Tensor:
        share = time[:, None, None]
        noisy = (1 - share) * latents + share * noise
        (found,) = self.model(hidden_states=noisy, timestep=time, return_dict=False, **told)
        loss: Tensor = (found.float() - (noise - latents).float()).square().mean()
        return loss


_TINY_MOE = {**_TINY_TEXT, **_TINY_EXPERTS}
_FLUX_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
_LORA = ("transformers", "peft")

MODELS = {
    "qwen3-30b-a3b": Model("qwen3_moe", QWEN3_30B_A3B, _TINY_MOE, Sizes(16, 2048)),
    # Experts without adapters: PEFT would add theirs to the experts' weights in full.
    "qwen3-30b-a3b-nf4-lora": Model(
        "qwen3_moe",
        QWEN3_30B_A3B,
        _TINY_MOE,
        Sizes(16, 2048),
        lora=LINEAR[:4],
        nf4=True,
        needs=(*_LORA, "bitsandbytes"),
    ),
    "qwen3-8b": Model("qwen3", QWEN3_8B, _TINY_TEXT, Sizes(8, 2048)),
    "qwen3-8b-lora": Model("qwen3", QWEN3_8B, _TINY_TEXT, Sizes(8, 2048), lora=LINEAR, needs=_LORA),
    "flux-lora": Model(
        "flux",
        FLUX,
        _TINY_FLUX,
        Sizes(2, 512, image=64),
        lora=_FLUX_LAYERS,
        draw=latents_and_texts,
        needs=("diffusers", "peft"),
        tiny_sizes=Sizes(2, 8, image=6),
    ),
    "qwen2.5-vl-7b-lora": Model(
        "qwen2_5_vl",
        QWEN2_5_VL_7B,
        _TINY_VL,
        Sizes(4, 512, image=64),
        lora=LINEAR,
        draw=images_and_texts,
        needs=_LORA,
        tiny_sizes=Sizes(2, 24, image=8),
    ),
    "qwen3-1.7b-grpo": Model(
        "qwen3",
        QWEN3_1_7B,
        _TINY_TEXT,
        Sizes(32, 256, new_tokens=128),
        draw=prompts,
        tiny_sizes=Sizes(4, 16, new_tokens=4),
    ),
}
