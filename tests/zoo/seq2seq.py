"""Models of transformers with an encoder and a decoder."""

from __future__ import annotations

from typing import Any

from tests.zoo.entry import BATCH, Call, Entry, Family, Rounding, floats, ids
from tests.zoo.hugging_face import TURNS, of_transformers

BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
ALONE = {"attention": ("eager",)}  # it has no other


def _texts() -> Call:
    return {"input_ids": ids(), "labels": ids(BATCH, 6, seed=3)}


def _sound() -> Call:
    return {"input_features": floats(BATCH, 8, 32), "labels": ids(BATCH, 6, seed=3)}


def texts(kind: str, config: dict[str, Any], **of_entry: Any) -> list[Entry]:
    head = "AutoModelForSeq2SeqLM"
    return of_transformers(Family.SEQ2SEQ, head, kind, config, _texts, **of_entry)


# Each layer adds to `x` a branch that begins with RMSNorm(x), where `x` is used twice. The plain
# backward adds the gradients of `x` as ((x + first) + second), and as (x + (first + second)) where
# the norm is in a captured graph and the addition is not. A plain model whose norms read
# `x.view_as(x)` adds as the latter, and is equal in every bit. After two steps the worst is off by
# 10 units of the last place, in float32 (1.3e-6) as in float64 (2.1e-15): the gradient of the
# router, which a softmax makes of differences.
ROUTED = Rounding(
    1e-5, "its norms are captured and its residuals are not: autograd adds in another order"
)
MASKED = "attention takes another kernel where transformers knows that it is captured"
DROPS = "a random number decides whether a layer is left out"

ENTRIES: list[Entry] = [
    *texts("t5", T5, **ALONE),
    *texts("mt5", T5, **ALONE),
    *texts("bart", BART),
    *texts("mbart", BART),
    *texts("marian", BART),
    *texts("pegasus", BART),
    *texts("m2m_100", BART, note=DROPS, draws=MASKED, rounding={"eager": TURNS, "sdpa": TURNS}),
    *texts(
        "switch_transformers",
        {
            **T5,
            "num_layers": 1,
            "num_decoder_layers": 1,
            "num_experts": 2,
            "expert_capacity": 8,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
        },
        note="the chosen experts are called in a loop over data",
        rounding={"eager": ROUTED},
        **ALONE,
    ),
    *of_transformers(
        Family.SEQ2SEQ,
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        _sound,
    ),
]
