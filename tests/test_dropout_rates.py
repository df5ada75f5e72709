"""Dropout whose rate changes from step to step: one schedule for all rates, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import compat, schedules
from tests.zoo import assert_same, twins

X = torch.linspace(-1, 1, 48).view(6, 8)


class Annealed(nn.Module):
    """Rates of a function and of modules, as keywords and by position."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(rate)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.layers[0](x))
        x = F.dropout(self.layers[1](x).tanh(), p=self.rate, training=self.training)
        return F.dropout(self.layers[2](x), self.rate).square().mean()


def at_rate(model: Any, rate: float) -> Tensor:
    model.rate = model.drop.p = rate
    torch.manual_seed(int(rate * 1000))
    loss: Tensor = model(X)
    if loss.requires_grad:
        loss.backward()
    return loss.detach()


def same_at(plain: Any, model: Any, rate: float) -> None:
    losses = [at_rate(each, rate) for each in (plain, model)]
    assert torch.equal(*losses), rate
    assert_same(plain, model)


def test_one_schedule_for_many_rates() -> None:
    """More of them than Dynamo captures of one function (256, as megacompile sets it)."""
    plain, model = twins(Annealed())
    for k in range(300):
        same_at(plain, model, 0.1 + k / 500)
    assert len(schedules(model)) == 2, "one for the first rate, one for all others"


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_nothing_or_everything_is_dropped(rate: float) -> None:
    plain, model = twins(Annealed())
    for each in (0.1, 0.2, rate, 0.3):
        same_at(plain, model, each)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    plain, model = twins(Annealed())
    for each in (0.1, 0.2):
        same_at(plain, model, each)
    for each in (plain, model):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            at_rate(each, rate)


def test_evaluation_drops_nothing() -> None:
    plain, model = twins(Annealed())
    for rate in (0.1, 0.2, 0.3):
        for each in (plain, model):
            each.train()
        same_at(plain, model, rate)
        for each in (plain, model):
            each.eval()
        same_at(plain, model, rate)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.rate = 0.1
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x).tanh() * 2, self.rate, True, True).square().mean()


def test_in_place_is_captured_as_ever() -> None:
    plain, model = twins(InPlace())
    for rate in (0.1, 0.2, 0.3):
        same_at(plain, model, rate)


@pytest.mark.skipif(not compat.has_cpp_compiler(), reason="Inductor needs a C++ compiler")
def test_inductor_compiles_no_rate_of_its_own() -> None:
    """But the first, which is dropped by Inductor's own random numbers."""
    plain, model = twins(Annealed(), lowering="inductor", progress=False)
    assert torch.isfinite(at_rate(model, 0.1))
    for rate in (0.2, 0.3, 0.4, 0.25):
        torch.testing.assert_close(at_rate(model, rate), at_rate(plain, rate))
    assert len(schedules(model)) == 2


def test_other_captures_are_left_alone() -> None:
    _, model = twins(Annealed())
    for rate in (0.1, 0.2):
        at_rate(model, rate)
    graphs: list[str] = []

    def backend(module: Any, examples: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    other = Annealed()
    compiled = torch.compile(other, backend=backend)
    for rate in (0.1, 0.2, 0.3):
        other.rate = other.drop.p = rate
        compiled(X)
    assert len(graphs) == 3 and not any("megacompile" in graph for graph in graphs)
