"""Qwen2.5 of any size, and others, over a 4-bit base of bitsandbytes, built without full weights.

One random layer of each shape is quantized, and its packed bytes are copied to all others of that
shape: what is measured does not look at the values. The model is made on `meta` and filled layer by
layer, so that building takes no more memory than the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
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
    pack(model, model.model.layers, device, double_quant=double_quant)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)
    result: nn.Module = model.train()
    return result


def pack(model: nn.Module, layers: nn.Module, device: str, *, double_quant: bool = True) -> None:
    """Give a model on `meta` frozen values on `device`: the linear layers and the experts of
    `layers` in NF4, the rest as it is."""
    patterns: dict[tuple[int, ...], Any] = {}
    for parent, name, layer in list(_linear_layers(layers)):
        setattr(parent, name, _packed(layer, patterns, device, double_quant))
    for module in list(layers.modules()):
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            _pack_experts(module, patterns, device)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param.device.type == "meta":
                setattr(module, name, nn.Parameter(_random(param, device), requires_grad=False))
    model.requires_grad_(False)


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def with_lora(
    model: nn.Module,
    rank: int = 16,
    *,
    targets: Sequence[str] = LINEAR,
    task: str | None = "CAUSAL_LM",
) -> nn.Module:
    """The model with LoRA in bf16, as PEFT makes it: on all linear layers of its layers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules=list(targets), task_type=task)
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


def _packed(
    layer: nn.Linear, patterns: dict[tuple[int, ...], Any], device: str, double_quant: bool
) -> Any:
    """A Linear4bit in the place of a layer on `meta`, with a copy of its shape's pattern."""
    from bitsandbytes import nn as bnb

    shape = (layer.out_features, layer.in_features)
    if shape not in patterns:
        patterns[shape] = _pattern(*shape, device, double_quant)
    with torch.device("meta"):
        made = bnb.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=double_quant,
            quant_type="nf4",
        )
    made.weight = _parameter(*patterns[shape], module=made)
    made.quant_state = made.weight.quant_state
    if made.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().to(torch.bfloat16), requires_grad=False)
    return made


def _pack_experts(experts: nn.Module, patterns: dict[tuple[int, ...], Any], device: str) -> None:
    """Put the stacked weights of experts into NF4; all experts are equal. A use of a weight gives
    it in full, as with `bitsandbytes.nn.parametrize`."""
    from bitsandbytes import functional

    def dense(name: str) -> property:
        def value(module: Any) -> torch.Tensor:
            weight = getattr(module, name)
            made: torch.Tensor = functional.dequantize_4bit(weight, weight.quant_state)
            return made

        return property(value)

    properties = {}
    for name in ("gate_up_proj", "down_proj"):
        shape = tuple(getattr(experts, name).shape)
        if shape not in patterns:
            data, state = _pattern(shape[1], shape[2], device, double_quant=False)
            state.shape, state.absmax = torch.Size(shape), state.absmax.repeat(shape[0])
            patterns[shape] = data.repeat(shape[0], 1), state
        delattr(experts, name)
        setattr(experts, f"{name}_nf4", _parameter(*patterns[shape], module=experts))
        properties[name] = dense(f"{name}_nf4")
    cls = type(experts)
    experts.__class__ = type(f"{cls.__name__}NF4", (cls,), properties)


def _pattern(rows: int, columns: int, device: str, double_quant: bool) -> tuple[Any, Any]:
    """The packed data of random numbers (rows, columns), and their state."""
    from bitsandbytes import functional

    maker = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(columns, generator=generator).to(maker, torch.bfloat16) * 0.02
    shifts = torch.arange(rows, device=maker)[:, None] * 7919  # of the row, in each row
    places = torch.arange(columns, device=maker)[None]
    weight = weight[(shifts + places * (1 + shifts % 13)) % columns]
    data, state = functional.quantize_4bit(
        weight, compress_statistics=double_quant, quant_type="nf4"
    )
    state.to(device)
    return data.to(device), state


def _parameter(data: torch.Tensor, state: Any, *, module: nn.Module) -> Any:
    """A parameter with copies of packed data and of their state."""
    from bitsandbytes import nn as bnb

    state = copy.deepcopy(state)
    return bnb.Params4bit(
        data.clone(),
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type="nf4",
        bnb_quantized=True,
        module=module,
    )


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
