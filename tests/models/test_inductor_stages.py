"""Stages that Inductor compiles: a real language model in tiles, whose attention gets no mask, and
dropout at any rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import compat, megacompile, schedules
from tests.zoo import hf_qwen2, twins

needs_compiler = pytest.mark.skipif(
    not compat.has_cpp_compiler(), reason="Inductor needs a C++ compiler"
)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@needs_compiler
@pytest.mark.parametrize(
    ("device", "checkpoints", "tiles"),
    [
        ("cpu", False, 1),
        pytest.param("cpu", True, 1, marks=pytest.mark.thorough),
        pytest.param("cpu", False, 4, marks=pytest.mark.thorough),
        pytest.param("cuda", False, 1, marks=pytest.mark.gpu),
        pytest.param("cuda", True, 1, marks=pytest.mark.gpu),
    ],
)
def test_a_language_model_learns_the_same(device: str, checkpoints: bool, tiles: int) -> None:
    """Hugging Face's, whose plain loop passes is_causal itself."""

    def made() -> Any:
        torch.manual_seed(0)
        model: Any = hf_qwen2(**SIZES, **HEADS, attn_implementation="sdpa").train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.to(device)

    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    plain = made()
    streamed = megacompile(made(), lowering="inductor", tiles=tiles, progress=False)
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, streamed)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for (name, a), b in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(b.grad.cpu(), a.grad.cpu(), rtol=1e-4, atol=1e-6, msg=name)
    reasons = [line for schedule in schedules(streamed) for line in schedule.plan.reasons]
    assert any(line.startswith("2 attentions are causal") for line in reasons)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, rate: float) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), rate)
        return x.square().mean()


@needs_compiler
def test_one_code_for_many_dropout_rates() -> None:
    """But the first, which is dropped by Inductor's own random numbers."""
    plain, model = twins(Annealed(), lowering="inductor", progress=False)
    x = torch.linspace(-1, 1, 48).view(6, 8)
    model(x, 0.1)
    for rate in (0.2, 0.3, 0.4):
        losses = []
        for each in (plain, model):
            torch.manual_seed(3)
            losses.append(each(x, rate))
        torch.testing.assert_close(*losses)
    assert len(schedules(model)) == 2
