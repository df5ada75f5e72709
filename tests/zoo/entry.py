"""What an architecture of the zoo is: how it is made, what it is called with, how exact it is; and
the packages that the models come from."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

PACKAGES = ("torch", "transformers", "torchvision", "timm", "diffusers")

# What torchvision looks for when it is imported, with what it says of them itself.
_OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@functools.cache
def is_installed(package: str) -> bool:
    """Is a package there?"""
    return importlib.util.find_spec(package) is not None


def version(package: str) -> str:
    """The version of a package, without the part that says for which device it was built."""
    return importlib.metadata.version(package).partition("+")[0]


@functools.cache
def prepare() -> None:
    """Let torchvision be imported next to a torch for another device."""
    if not is_installed("torchvision"):
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as failed:
        if "torchvision::" not in str(failed):
            raise
        _library().define(_OPERATORS["nms"])
        _library().define(_OPERATORS["qnms"])
        importlib.import_module("torchvision")


@functools.cache
def _library() -> torch.library.Library:
    """Kept: operators go with the object that has defined them."""
    return torch.library.Library("torchvision", "FRAGMENT")


Call = Mapping[str, Any]  # keyword inputs of a call
BATCH, LENGTH, VOCABULARY = 2, 8, 64


class Family(Enum):
    """The parts of the table, in their order."""

    DECODERS = "Decoders"
    ENCODERS = "Encoders"
    SEQ2SEQ = "Encoder and decoder"
    VISION = "Vision"
    MULTIMODAL = "Vision and language"
    AUDIO = "Audio"
    TORCH = "torch itself"
    DIFFUSION = "Diffusion"


@dataclass(frozen=True, slots=True)
class Rounding:
    """What an entry may be off by with eager lowering, and why it is not equal in every bit."""

    tolerance: float  # relative to the largest value of the tensor
    why: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One architecture with a tiny configuration.

    `build` is called with torch's seed at 0; its model is in training mode or is put there. `call`
    gives the inputs. The loss is the output's `loss`, or else the mean of the squares of each
    floating output.
    """

    name: str
    family: Family
    build: Callable[[], nn.Module]
    call: Callable[[], Call]
    needs: str = "torch"  # the package that it comes from
    rounding: Rounding | None = None
    note: str = ""  # why it leaves the schedule, where it does
    draws: str = ""  # why Inductor drops other elements: it is compared without dropout

    @property
    def is_there(self) -> bool:
        """Is its package installed?"""
        return is_installed(self.needs)


def seeded(seed: int = 1) -> torch.Generator:
    """A generator for inputs."""
    return torch.Generator().manual_seed(seed)


def ids(*size: int, below: int = VOCABULARY, seed: int = 1) -> Tensor:
    """int64 tokens; none is 0, 1 or 2, which often stand for padding, begin and end."""
    return torch.randint(3, below, size or (BATCH, LENGTH), generator=seeded(seed))


def floats(*size: int, seed: int = 2) -> Tensor:
    """Normally distributed float32."""
    return torch.randn(*size, generator=seeded(seed))


# Parts of configurations: names of other parts, and values.
PARTS = """
TINY: vocab_size=64 SIZES num_hidden_layers=2 max_position_embeddings=64 SPECIAL
SIZES: hidden_size=32 intermediate_size=48 num_attention_heads=4
SPECIAL: pad_token_id=0 bos_token_id=1 eos_token_id=2
GROUPED: TINY num_key_value_heads=2
BOTH_SIDES: d_model=32 SIDES encoder_ffn_dim=48 decoder_ffn_dim=48
SIDES: encoder_layers=2 decoder_layers=2 encoder_attention_heads=4 decoder_attention_heads=4
EXPERTS: num_experts=4 num_experts_per_tok=2 moe_intermediate_size=16
LATENT: q_lora_rank=16 kv_lora_rank=16 qk_rope_head_dim=8 qk_nope_head_dim=8 v_head_dim=8
SMALL: n_embd=32 n_layer=2 n_head=4 vocab_size=64 n_positions=64
STATES: vocab_size=64 hidden_size=32 num_hidden_layers=2 state_size=8
DROPPED: hidden_dropout_prob=0.1 attention_probs_dropout_prob=0.1
BART: BOTH_SIDES vocab_size=64 max_position_embeddings=64 SPECIAL BEGINS forced_eos_token_id=2
BEGINS: decoder_start_token_id=2
T5: vocab_size=64 d_model=32 d_kv=8 d_ff=48 num_layers=2 num_heads=4 pad_token_id=0 T5_BEGINS
T5_BEGINS: eos_token_id=1 decoder_start_token_id=0
SEEING: SIZES num_hidden_layers=2 image_size=32 patch_size=8 num_labels=4
SWIN: image_size=32 patch_size=2 embed_dim=16 WINDOWS num_labels=4
WINDOWS: depths=[2,2] num_heads=[2,4] window_size=4
RESNET: embedding_size=8 hidden_sizes=[8,16] depths=[1,1] num_labels=4
BACKBONE: RESNET model_type=resnet layer_type=basic out_features=['stage2']
SIGHT: SEEING image_size=16
QWEN: image_token_id=60 video_token_id=63 vision_start_token_id=61 vision_end_token_id=62
ROPE: rope_type=default mrope_section=[1,1,2] rope_theta=10000.0
PATCHED: depth=2 hidden_size=32 num_heads=4 patch_size=8
ROTATED: GROUPED rope_parameters=ROPE
IMAGES: image_token_index=60 image_token_id=60
WAVE: SIZES num_hidden_layers=2 vocab_size=32 CONVOLVED MASKED ctc_loss_reduction=mean
CONVOLVED: conv_dim=[16,16] conv_kernel=[10,3] conv_stride=[5,2] num_feat_extract_layers=2 POSITIONS
POSITIONS: num_conv_pos_embeddings=8 num_conv_pos_embedding_groups=4
MASKED: mask_time_prob=0.0 mask_feature_prob=0.0 layerdrop=0.0
BLOCKS: block_out_channels=(8,16) layers_per_block=1 norm_num_groups=4
LATENTS: HEADS num_layers=2 sample_size=8
HEADS: num_attention_heads=4 attention_head_dim=8 in_channels=4
PROMPT: joint_attention_dim=32 pooled_projection_dim=16
"""
CONFIGS = dict(line.split(": ") for line in PARTS.strip().splitlines())


def configured(text: str) -> dict[str, Any]:
    """`GROUPED head_dim=8 kind=other rope=ROPE`: what the parts have, and these values."""
    found: dict[str, Any] = {}
    for word in text.split():
        name, is_value, value = word.partition("=")
        if not is_value:
            found |= configured(CONFIGS[name])
        elif value in CONFIGS:
            found[name] = configured(CONFIGS[value])
        else:
            found[name] = value if re.fullmatch("[a-z]\\w*", value) else ast.literal_eval(value)
    return found


TURNS = Rounding(
    1e-6, "captured and eager code use a value in turns: autograd adds in another order"
)
BOTH = ("eager", "sdpa")  # implementations of attention
ALONE: dict[str, Any] = {"attention": ("eager",)}  # it has no other


def of_transformers(
    family: Family,
    head: str,
    kind: str,
    config: str | dict[str, Any],
    call: Callable[[], Call],
    *,
    attention: tuple[str, ...] = BOTH,
    rounding: Mapping[str, Rounding] | None = None,
    note: str = "",
    draws: str = "",
) -> list[Entry]:
    """One entry for each implementation of attention, of a configuration's `model_type` and the
    class `head` that makes its model; `rounding` by implementation."""
    config = configured(config) if isinstance(config, str) else config
    return [
        Entry(
            name=f"{kind} ({each})" if len(attention) > 1 else kind,
            family=family,
            build=functools.partial(_pretrained, head, kind, config, each),
            call=call,
            needs="transformers",
            rounding=(rounding or {}).get(each),
            note=note,
            draws=draws,
        )
        for each in attention
    ]


def _pretrained(head: str, kind: str, config: dict[str, Any], attention: str) -> nn.Module:
    library = importlib.import_module("transformers")
    made = library.AutoConfig.for_model(kind, **config)
    maker = getattr(library, head)
    if head.startswith("Auto"):
        model: nn.Module = maker.from_config(made, attn_implementation=attention)
    else:
        model = maker._from_config(made, attn_implementation=attention)
    return model


def of_diffusers(kind: str, config: str, call: Callable[[], Call]) -> Entry:
    """An entry for a class of diffusers."""

    def build() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), kind)(**configured(config))

    return Entry(kind, Family.DIFFUSION, build, call, "diffusers")
