"""Entries for the models of transformers and diffusers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tests.zoo.entry import VOCABULARY, Call, Entry, Family, Rounding

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
