"""Configs of small models, as transformers writes them, for the tests of `plan`."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {  # of a model with two layers
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
