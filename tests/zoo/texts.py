"""Models of transformers that read text: decoders, which are trained on their own tokens, encoders
(masked language models and classifiers), and those with both.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.entry import (
    ALONE,
    BATCH,
    LENGTH,
    TURNS,
    Call,
    Entry,
    Family,
    Rounding,
    floats,
    ids,
    of_transformers,
)

# --- decoders


def _own() -> Call:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


def decoder(kind: str, config: str, **of_entry: Any) -> list[Entry]:
    return of_transformers(Family.DECODERS, "AutoModelForCausalLM", kind, config, _own, **of_entry)


LOGS = "transformers logs a warning in its loss, once"
SCAN = Rounding(1e-6, "where it is captured, transformers takes an associative scan")

DECODERS: list[Entry] = [
    *decoder("llama", "GROUPED"),
    *decoder("qwen2", "GROUPED"),
    *decoder("qwen3", "GROUPED head_dim=8"),
    *decoder("mistral", "GROUPED head_dim=8"),
    *decoder("gemma", "GROUPED head_dim=8"),
    *decoder("gemma2", "GROUPED head_dim=8 sliding_window=4", **ALONE),
    *decoder("gemma3_text", "GROUPED head_dim=8 sliding_window=4"),
    *decoder("phi", "GROUPED"),
    *decoder("phi3", "GROUPED"),
    *decoder("gpt2", "SMALL", note=LOGS),
    *decoder("gpt_neox", "TINY"),
    *decoder("gptj", "SMALL rotary_dim=4", **ALONE),
    *decoder("falcon", "GROUPED"),
    *decoder("bloom", "vocab_size=64 hidden_size=32 n_layer=2 n_head=4", **ALONE),
    *decoder("opt", "TINY ffn_dim=48 word_embed_proj_dim=32"),
    *decoder("olmo2", "GROUPED"),
    *decoder("cohere", "GROUPED"),
    *decoder("stablelm", "GROUPED"),
    *decoder("starcoder2", "GROUPED"),
    *decoder("granite", "GROUPED"),
    *decoder("glm", "GROUPED head_dim=8"),
    *decoder("smollm3", "GROUPED"),
    *decoder("mixtral", "GROUPED num_local_experts=4"),
    *decoder("qwen3_moe", "GROUPED EXPERTS head_dim=8"),
    *decoder("olmoe", "GROUPED EXPERTS"),
    *decoder(
        "deepseek_v3",
        "TINY EXPERTS LATENT num_key_value_heads=4 n_routed_experts=4 n_group=2 topk_group=1 "
        "first_k_dense_replace=1",
    ),
    *decoder("mamba", "STATES", rounding={"eager": SCAN}, **ALONE),
    *decoder("mamba2", "STATES num_heads=4 head_dim=16 n_groups=2 chunk_size=4", **ALONE),
    *decoder(
        "rwkv",
        "vocab_size=64 hidden_size=32 num_hidden_layers=2 attention_hidden_size=32",
        note="in eval, it divides weights in place: such a call runs in eager mode",
        **ALONE,
    ),
    *decoder(
        "jamba",
        "GROUPED num_experts=2 attn_layer_period=2 attn_layer_offset=1 expert_layer_period=2 "
        "expert_layer_offset=1 mamba_d_state=8 mamba_dt_rank=4 use_mamba_kernels=False",
        rounding={"eager": SCAN, "sdpa": SCAN},
    ),
    *decoder(
        "recurrent_gemma",
        "GROUPED lru_width=32 attention_window_size=8 head_dim=8 use_cache=False",
        **ALONE,
    ),
]

# --- encoders


def _masked() -> Call:
    """The second row is padded."""
    tokens = ids()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def _classified() -> Call:
    return {"input_ids": ids(), "labels": torch.tensor([0, 1])}


def encoder(kind: str, config: str, **of_entry: Any) -> list[Entry]:
    return of_transformers(
        Family.ENCODERS, "AutoModelForMaskedLM", kind, f"TINY {config}", _masked, **of_entry
    )


def classifier(kind: str, config: str, **of_entry: Any) -> list[Entry]:
    head = "AutoModelForSequenceClassification"
    return of_transformers(Family.ENCODERS, head, kind, f"TINY {config}", _classified, **of_entry)


ENCODERS: list[Entry] = [
    *encoder("bert", "DROPPED"),
    *encoder("roberta", "DROPPED"),
    *encoder(
        "deberta",
        "pos_att_type=['c2p','p2c'] relative_attention=True",
        note="its attention calls `item()`, and functions of torch.jit",
        rounding={"eager": TURNS},
        **ALONE,
    ),
    *encoder("deberta-v2", "pos_att_type=['c2p','p2c'] relative_attention=True", **ALONE),
    *encoder("modernbert", "cls_token_id=1 sep_token_id=2 local_attention=4"),
    *encoder("electra", "embedding_size=16"),
    *encoder("albert", "embedding_size=16"),
    *encoder("distilbert", "dim=32 n_layers=2 n_heads=4 hidden_dim=48 dropout=0.1"),
    *encoder("mpnet", "", **ALONE),
    *encoder("xlm-roberta", ""),
    *classifier("ernie", ""),
]

# --- encoders with decoders


def _texts() -> Call:
    return {"input_ids": ids(), "labels": ids(BATCH, 6, seed=3)}


def texts(kind: str, config: str, **of_entry: Any) -> list[Entry]:
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

SEQ2SEQ: list[Entry] = [
    *texts("t5", "T5", **ALONE),
    *texts("mt5", "T5", **ALONE),
    *texts("bart", "BART"),
    *texts("mbart", "BART"),
    *texts("marian", "BART"),
    *texts("pegasus", "BART"),
    *texts("m2m_100", "BART", note=DROPS, draws=MASKED, rounding={"eager": TURNS, "sdpa": TURNS}),
    *texts(
        "switch_transformers",
        "T5 num_layers=1 num_decoder_layers=1 num_experts=2 expert_capacity=8 "
        "num_sparse_encoder_layers=1 num_sparse_decoder_layers=1",
        note="the chosen experts are called in a loop over data",
        rounding={"eager": ROUTED},
        **ALONE,
    ),
    *of_transformers(
        Family.SEQ2SEQ,
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        "BART num_mel_bins=8 max_source_positions=16 max_target_positions=16",
        lambda: {"input_features": floats(BATCH, 8, 32), "labels": ids(BATCH, 6, seed=3)},
    ),
]

ENTRIES = [*DECODERS, *ENCODERS, *SEQ2SEQ]
