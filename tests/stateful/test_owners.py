"""Who owns parameters: two megacompiled models, parts, dead ones; and whose states are kept."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from megacompile import megacompile
from megacompile.errors import ModelError
from tests import inside
from tests.zoo import equal


class Two(nn.Module):
    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8) if encoder is None else encoder
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out


def compiled(model: Any, **options: Any) -> Any:
    return megacompile(model, device="cpu", lowering="eager", progress=False, **options)


def test_two_models_with_a_parameter_in_common() -> None:
    encoder = nn.Linear(8, 8)
    one, other, tied = compiled(Two(encoder)), Two(encoder), Two()
    tied.encoder.weight = encoder.weight
    for second in (other, tied, one.encoder):
        with pytest.raises(ModelError, match="is owned by another megacompiled model"):
            compiled(second)
        assert second is one.encoder or not inside.is_streamed(second), "it is as it was"
    x = torch.rand(2, 8)
    assert equal(one(x), one.head(encoder(x)))
    assert equal(other(x), other.head(encoder(x))), "a plain model may use it"
    assert compiled(one) is one
    assert equal(one(x), compiled(copy.deepcopy(one))(x))


def test_tied_after_both_were_megacompiled() -> None:
    one, other = compiled(Two()), compiled(Two())
    own = other.encoder.weight
    other.encoder.weight = one.encoder.weight
    x = torch.rand(2, 8)
    with pytest.raises(ModelError, match="is owned by another megacompiled model"):
        other(x)
    assert equal(one(x), one.head(one.encoder(x)))
    other.encoder.weight = own
    assert equal(other(x), other.head(other.encoder(x)))
    for model in (one, other):
        model(x).sum().backward()
        assert model.encoder.weight.grad is not None


def test_a_parameter_that_was_given_away() -> None:
    """Its owner has another one in its place, and was not called since."""
    one, other = compiled(Two()), Two()
    moved = one.encoder.weight
    one.encoder.weight = nn.Parameter(torch.rand(8, 8))
    other.encoder.weight = moved
    plain = copy.deepcopy(nn.ModuleList([one, other]))
    compiled(other)
    for pair in ((one, other), plain):
        optimizer = AdamW([p for model in pair for p in model.parameters()], lr=1e-2)
        for i in range(6):
            x = torch.rand(2, 8, generator=torch.Generator().manual_seed(i))
            for model in pair if i > 2 else (pair[1],):
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for model, want in zip((one, other), plain, strict=True):
        for got, wanted in zip(model.parameters(), want.parameters(), strict=True):
            assert equal(got.detach(), wanted.detach())


def test_parameters_of_a_dead_model() -> None:
    encoder = nn.Linear(8, 8)
    one: Any = compiled(Two(encoder))
    x = torch.rand(2, 8)
    one(x).sum().backward()
    del one  # nobody collects it: a model and what is behind its calls refer to each other
    gc.disable()
    try:
        other = compiled(Two(encoder))
    finally:
        gc.enable()
    assert equal(other(x), other.head(encoder(x)))


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16, "resident": "all"}])
def test_states_go_with_their_optimizer(options: dict[str, Any]) -> None:
    """Their memory is free when it is gone, but for what somebody holds."""
    model = compiled(Two(), **options)

    def train(optimizer: AdamW) -> None:
        for _ in range(2):
            model(torch.rand(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(optimizer)
    buffers = [
        weakref.ref(buffer)
        for bucket in inside.buckets(model).values()
        for by_param in bucket.states.of(optimizer).values()
        for buffer in by_param.values()
    ]
    assert len(buffers) == 8
    held = optimizer.state[model.head.weight]["exp_avg"].detach()
    before = held.clone()
    del optimizer
    model(torch.rand(4, 8)).sum().backward()
    inside.wait_for_updates(model)
    assert not any(buffer() is not None for buffer in buffers)
    train(AdamW(model.parameters(), lr=1e-2))
    assert equal(held, before)
