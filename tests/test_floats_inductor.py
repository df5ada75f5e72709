"""Models whose floats change from step to step, with Inductor: at most three compilations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import compat, schedules
from tests.draws import drawn
from tests.zoo import twins

pytestmark = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="no C++ compiler here")

X = torch.linspace(-1, 1, 48).view(6, 8)
Y = torch.arange(6) % 4


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that are compiled."""
    found: list[Any] = []
    make = compat.compile_inductor

    def noted(module: Any, given: Any) -> Any:
        found.append(module)
        return make(module, given)

    monkeypatch.setattr(compat, "compile_inductor", noted)
    yield found


class Annealed(nn.Module):
    """A temperature, a weight of a loss, and a scale that a counter makes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=dtype)
        self.second = nn.Linear(8, 4, dtype=dtype)

    def forward(self, x: Tensor, temperature: float, weight: float, step: int) -> Tensor:
        h = (self.first(x) * temperature).tanh() + x * (1 / (step + 4))
        h = torch.lerp(torch.where(h > temperature - 1, h, -weight), x, weight)
        penalty = (h.square() + 0.1).pow(1 + weight).mean() * weight + (temperature**h).mean()
        return F.cross_entropy(self.second(h).float() / temperature, Y) + penalty


def trained(model: nn.Module, k: int, x: Tensor = X) -> Tensor:
    loss: Tensor = model(x, 1.0 - k / 80, 0.01 * (k + 1), k)
    loss.backward()
    return loss.detach()


def assert_close_gradients(plain: nn.Module, streamed: nn.Module, places: float = 1e-5) -> None:
    for mine, theirs in zip(plain.parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=places, atol=places)


@pytest.mark.thorough
def test_forty_values_are_compiled_at_most_three_times(compilations: list[Any]) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Annealed(), lowering="inductor", progress=False)
    counts = []
    for k in range(40):
        losses = [trained(model, k) for model in (plain, streamed)]
        torch.testing.assert_close(*losses)
        assert_close_gradients(plain, streamed)
        if k % 4 == 3:  # gradients are those of four values
            plain.zero_grad()
            streamed.zero_grad()
        counts.append(len(compilations))
    assert counts[3:] == [counts[3]] * 37
    assert len(schedules(streamed)) <= 3
    assert counts[3] <= 3 * counts[0]


@pytest.mark.parametrize("dtype", drawn([torch.bfloat16], [torch.float16]), ids=str)
def test_a_float_leaves_half_precision_as_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Annealed(dtype), lowering="inductor", progress=False)
    for k in range(4):
        losses = [trained(model, k, X.to(dtype)) for model in (plain, streamed)]
        torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    for theirs in streamed.parameters():
        assert theirs.grad is not None and theirs.grad.dtype == dtype
    assert_close_gradients(plain, streamed, 2e-2)
    assert len(schedules(streamed)) <= 3


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        h: Tensor = self.linear(x) * temperature
        return (h.sin() if temperature > 0.5 else h.cos()).mean()


def test_code_that_asks_for_a_float(compilations: list[Any]) -> None:
    plain, streamed = twins(Branching(), lowering="inductor", progress=False)
    for t in (1.0, 0.9, 0.1, 0.7, 0.5, 0.3, 0.51, 0.2):
        losses = [model(X, t) for model in (plain, streamed)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    assert_close_gradients(plain, streamed)
    assert len(schedules(streamed)) <= 3


class Sized(nn.Module):
    """A float that makes a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, stride: float) -> Tensor:
        made: Tensor = self.linear(x).sum() * torch.arange(0.0, 8.0, stride).sum()
        return made


def test_a_float_that_makes_a_size(caplog: pytest.LogCaptureFixture) -> None:
    """Each of its values has code of its own, and sizes stay symbols."""
    plain, streamed = twins(Sized(), lowering="inductor", progress=False)
    with caplog.at_level("INFO", "megacompile.capture"):
        for stride, rows in ((1.0, 6), (0.9, 7), (0.6, 8), (0.6, 9)):
            x = torch.linspace(-1, 1, 8 * rows).view(rows, 8)
            torch.testing.assert_close(plain(x, stride), streamed(x, stride))
    assert "each value of a float gets its own code: " in caplog.text
    symbols = schedules(streamed)[-1].symbols
    assert symbols is not None and len(symbols.planned) == 1
    assert len(schedules(streamed)) == 3


class Compares(nn.Module):
    """What it computes depends on comparisons of a float, and on ints that are made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, t: float) -> Tensor:
        y = self.first(x).tanh()
        near = abs(t - 0.2) < 1e-6
        y = self.second(y * int(t * 10) + (t > 0.25) * y.mean())
        loss: Tensor = y.square().mean() * bool(t) + near * y.sum() + max(t, 0.3) * y.mean()
        return loss


def test_comparisons_of_a_float() -> None:
    """Each way that they can turn out is a program; no value is."""
    torch.manual_seed(0)
    plain, streamed = twins(Compares(), lowering="inductor", progress=False)
    for t in (0.1, 0.2, 0.3, 0.4, 0.37, 0.2, 0.12, 0.5):
        losses = [model(X, t) for model in (plain, streamed)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    assert_close_gradients(plain, streamed)
    assert len(schedules(streamed)) <= 5


class Added(nn.Module):
    """Its backward takes no float."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, t: float) -> Tensor:
        y = self.linear(x)
        return torch.where(y > t, y, t).mean() + int(t * 10)


def test_a_backward_that_takes_no_float(compilations: list[Any]) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Added(), lowering="inductor", progress=False)
    for t in (0.1, 0.2, 0.3, 0.4, 0.37):
        losses = [model(X, t) for model in (plain, streamed)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    assert_close_gradients(plain, streamed)
    assert len(schedules(streamed)) == 2
