"""Buckets move to where the plan wants them before anything runs, where a call can begin again."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import DeviceMemoryError, megacompile, schedules
from tests import inside
from tests.zoo import assert_same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).relu())
        loss: Tensor = self.norm(x).square().mean()
        return loss


class Talks(Net):
    """A line that Dynamo does not capture comes first."""

    def forward(self, x: Tensor) -> Tensor:
        _note(self)
        return super().forward(x)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _note(net: Net) -> None:
    net.calls += 1


def settled(model: nn.Module) -> bool:
    """Do all buckets live on the device?"""
    return inside.residents(model) == inside.buckets(model).keys()


def x_of(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.ones(4, 8) * seed + torch.arange(8)


def run(model: nn.Module, steps: int) -> list[Tensor]:
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(steps):
        loss = model(x_of(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def pair(kind: type[Net] = Net) -> tuple[Any, Any]:
    """(plain, megacompiled)."""
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    return plain, megacompile(model, device="cpu", gpu_memory="2MiB", progress=False)


def captures(caplog: pytest.LogCaptureFixture) -> int:
    return len([r for r in caplog.records if r.name == "megacompile.capture"])


def test_the_first_call_has_them_where_they_belong(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = pair()
    with caplog.at_level(logging.INFO, "megacompile.capture"):
        for each in (model, plain):
            each(x_of(5))
        assert settled(model)
        (first,) = schedules(model)
        losses = run(model, 3)
    assert captures(caplog) == 1 and schedules(model) == [first]
    assert all(map(torch.equal, losses, run(plain, 3)))
    assert_same(plain, model)


@pytest.mark.parametrize("held", [False, True])
def test_another_name_of_what_moves_is_told_of(*, held: bool) -> None:
    _, model = pair()
    state = model.state_dict() if held else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(model, 2)
    assert settled(model)
    assert len([w for w in said if "layers.0.weight" in str(w.message)]) == held
    del state


def test_what_has_run_is_not_run_again() -> None:
    plain, model = pair(Talks)
    losses = [each(x_of(7)).detach() for each in (plain, model)]
    assert torch.equal(*losses) and model.calls == plain.calls
    assert not inside.residents(model), "not in this call"
    assert all(map(torch.equal, run(model, 3), run(plain, 3)))
    assert settled(model) and model.calls == plain.calls


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(self.wide(x).tanh())
        return result


def test_buckets_leave_the_device_for_larger_inputs(caplog: pytest.LogCaptureFixture) -> None:
    """The first batch is small, and puts all of them there. Nothing is captured again when they
    have left, nor for sizes that there is room for."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(4)))
    model = copy.deepcopy(plain)
    megacompile(model, device="cpu", gpu_memory="2MiB", progress=False)
    pairs = [(each, torch.optim.AdamW(each.parameters(), lr=1e-2)) for each in (plain, model)]
    residents = []
    with caplog.at_level(logging.INFO, "megacompile.capture"):
        for rows in (8, 16, 100, 900, 1000, 50):
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
            for each, optimizer in pairs:
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            residents.append(len(inside.residents(model)))
    assert residents == [4, 4, 4, 0, 0, 0]
    assert captures(caplog) == 2, "8, any"
    assert_same(plain, model)


class Broken(nn.Module):
    """Two captured graphs. The first one draws random numbers."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.layers = first, nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x: Tensor) -> Any:
        x = nn.functional.dropout(self.first(x), 0.5)
        torch._dynamo.graph_break()
        return self.layers(x)


def broken(first: nn.Module) -> tuple[Any, Any]:
    """(plain, megacompiled), whose buckets live on the device, with room for few rows."""
    torch.manual_seed(0)
    plain = Broken(first)
    model = megacompile(
        copy.deepcopy(plain), device="cpu", lowering="eager", gpu_memory="2MiB", progress=False
    )
    models: tuple[Any, Any] = plain, model
    for each in models:
        each.optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
    for rows in (8, 8):
        train(models, rows)
    assert len(inside.residents(model)) >= 4
    return models


def train(models: tuple[Any, ...], rows: int) -> None:
    for each in models:
        torch.manual_seed(rows)
        each(torch.randn(rows, 64)).square().mean().backward()
        each.optimizer.step()
        each.optimizer.zero_grad()


@pytest.mark.parametrize("first", [nn.Identity(), nn.Linear(64, 64)])
def test_a_call_that_has_begun_begins_again_where_nothing_fits_otherwise(first: nn.Module) -> None:
    plain, model = broken(first)
    for rows in (1100, 1100, 8):
        train((plain, model), rows)
        assert inside.residents(model) <= {"first"}
    assert_same(plain, model)


def test_a_call_that_cannot_begin_again_fails_and_the_next_one_runs() -> None:
    """The BatchNorm has counted its batch."""
    plain, model = broken(nn.BatchNorm1d(64))
    with pytest.raises(DeviceMemoryError):
        train((model,), 1100)
    model.load_state_dict(plain.state_dict())
    train((plain, model), 1100)
    assert_same(plain, model)
