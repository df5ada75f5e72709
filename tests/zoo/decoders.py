"""Decoders of transformers: language models that are trained on their own tokens."""

from __future__ import annotations

from typing import Any

from tests.zoo.entry import Call, Entry, Family, Rounding, ids
from tests.zoo.hugging_face import GROUPED, TINY, of_transformers

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}


def _call() -> Call:
    tokens = ids()
    return {"input_ids": tokens, "labels": tokens}


def decoder(kind: str, config: dict[str, Any], **of_entry: Any) -> list[Entry]:
    return of_transformers(Family.DECODERS, "AutoModelForCausalLM", kind, config, _call, **of_entry)


ALONE = {"attention": ("eager",)}  # it has no other

LOGS = "transformers logs a warning in its loss, once"
SCAN = Rounding(1e-6, "where it is captured, transformers takes an associative scan")

ENTRIES: list[Entry] = [
    *decoder("llama", GROUPED),
    *decoder("qwen2", GROUPED),
    *decoder("qwen3", {**GROUPED, "head_dim": 8}),
    *decoder("mistral", {**GROUPED, "head_dim": 8}),
    *decoder("gemma", {**GROUPED, "head_dim": 8}),
    *decoder("gemma2", {**GROUPED, "head_dim": 8, "sliding_window": 4}, **ALONE),
    *decoder("gemma3_text", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    *decoder("phi", GROUPED),
    *decoder("phi3", GROUPED),
    *decoder("gpt2", SMALL, note=LOGS),
    *decoder("gpt_neox", TINY),
    *decoder("gptj", {**SMALL, "rotary_dim": 4}, **ALONE),
    *decoder("falcon", GROUPED),
    *decoder("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, **ALONE),
    *decoder("opt", {**TINY, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    *decoder("olmo2", GROUPED),
    *decoder("cohere", GROUPED),
    *decoder("stablelm", GROUPED),
    *decoder("starcoder2", GROUPED),
    *decoder("granite", GROUPED),
    *decoder("glm", {**GROUPED, "head_dim": 8}),
    *decoder("smollm3", GROUPED),
    *decoder("mixtral", {**GROUPED, "num_local_experts": 4}),
    *decoder("qwen3_moe", {**GROUPED, **EXPERTS, "head_dim": 8}),
    *decoder("olmoe", {**GROUPED, **EXPERTS}),
    *decoder(
        "deepseek_v3",
        {
            **TINY,
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    *decoder(
        "mamba",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        rounding={"eager": SCAN},
        **ALONE,
    ),
    *decoder(
        "mamba2",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 4,
        },
        **ALONE,
    ),
    *decoder(
        "rwkv",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
        note="in eval, it divides weights in place: such a call runs in eager mode",
        **ALONE,
    ),
    *decoder(
        "jamba",
        {
            **GROUPED,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        rounding={"eager": SCAN, "sdpa": SCAN},
    ),
    *decoder(
        "recurrent_gemma",
        {**GROUPED, "lru_width": 32, "attention_window_size": 8, "head_dim": 8, "use_cache": False},
        **ALONE,
    ),
]
