"""`sdpa` attention of transformers is equal in every bit on the CPU, whatever mask is given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megacompile import megacompile
from tests.draws import drawn

transformers = pytest.importorskip("transformers")


def model(kind: str) -> Any:
    config, causal = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "sliding window": (transformers.MistralConfig, transformers.MistralForCausalLM),
    }[kind]
    sizes: dict[str, Any] = {"sliding_window": 8} if kind == "sliding window" else {}
    torch.manual_seed(0)
    return causal(
        config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            attn_implementation="sdpa",
            **sizes,
        )
    )


def mask(kind: str, ids: Tensor) -> Tensor | None:
    ones = torch.ones_like(ids)
    if kind == "padded":
        ones[0, :5] = 0
    return None if kind == "none" else ones


@pytest.mark.parametrize("kind", drawn(["sliding window"], ["qwen2"]))
def test_the_same_bits_with_every_mask(kind: str) -> None:
    plain = model(kind)
    streamed = megacompile(copy.deepcopy(plain), progress=False)
    ids = torch.arange(48).view(2, 24) % 64
    for given in ("none", "ones", "padded"):
        outputs = []
        for each in (plain, streamed):
            each.zero_grad()
            output = each(ids, attention_mask=mask(given, ids), labels=ids, use_cache=False)
            output.loss.backward()
            outputs.append(output)
        assert torch.equal(outputs[0].logits, outputs[1].logits), given
        assert torch.equal(outputs[0].loss, outputs[1].loss), given
        grouped = kind == "qwen2" and given != "padded"  # plain sums the heads of a group elsewhere
        for a, b in zip(plain.parameters(), streamed.parameters(), strict=True):
            if grouped:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)
            else:
                assert torch.equal(a.grad, b.grad), given
