"""What an architecture of the zoo is: how it is made, what it is called with, how exact it is; and
the packages that the models come from."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
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


Config = Mapping[str, Any]

# What most configurations of transformers call the same.
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH_SIDES = {  # of models with an encoder and a decoder
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
}
GROUPED = {**TINY, "num_key_value_heads": 2}
TURNS = Rounding(
    1e-6, "captured and eager code use a value in turns: autograd adds in another order"
)
BOTH = ("eager", "sdpa")  # implementations of attention
ALONE: dict[str, Any] = {"attention": ("eager",)}  # it has no other


def of_transformers(
    family: Family,
    head: str,
    kind: str,
    config: Config,
    call: Callable[[], Call],
    *,
    attention: tuple[str, ...] = BOTH,
    rounding: Mapping[str, Rounding] | None = None,
    note: str = "",
    draws: str = "",
) -> list[Entry]:
    """One entry for each implementation of attention, of a configuration's `model_type` and the
    class `head` that makes its model; `rounding` by implementation."""
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


def _pretrained(head: str, kind: str, config: Config, attention: str) -> nn.Module:
    library = importlib.import_module("transformers")
    made = library.AutoConfig.for_model(kind, **config)
    maker = getattr(library, head)
    if head.startswith("Auto"):
        model: nn.Module = maker.from_config(made, attn_implementation=attention)
    else:
        model = maker._from_config(made, attn_implementation=attention)
    return model


def of_diffusers(kind: str, config: Config, call: Callable[[], Call]) -> Entry:
    """An entry for a class of diffusers."""

    def build() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), kind)(**config)

    return Entry(kind, Family.DIFFUSION, build, call, "diffusers")
