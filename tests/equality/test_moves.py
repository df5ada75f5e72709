"""Buckets move to where the plan wants them before anything runs, where a call can begin again."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules
from tests import inside


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


def run(model: nn.Module, steps: int) -> list[Tensor]:
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(steps):
        torch.manual_seed(seed)
        loss = model(torch.ones(4, 8) * seed + torch.arange(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def make(kind: type[Net]) -> Any:
    torch.manual_seed(0)
    return megacompile(kind(), device="cpu", gpu_memory="1MiB", progress=False)


def test_the_first_call_has_them_where_they_belong(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain, model = Net(), make(Net)
    with caplog.at_level(logging.INFO, "megacompile.capture"):
        for each in (model, plain):
            torch.manual_seed(5)
            each(torch.ones(4, 8) + torch.arange(8))
        assert settled(model)
        (first,) = schedules(model)
        losses = run(model, 3)
    assert len([r for r in caplog.records if r.name == "megacompile.capture"]) == 1
    assert schedules(model) == [first]
    assert all(map(torch.equal, losses, run(plain, 3)))
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("held", [False, True])
def test_another_name_of_what_moves_is_told_of(*, held: bool) -> None:
    model = make(Net)
    state = model.state_dict() if held else None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(model, 2)
    assert settled(model)
    assert len([w for w in said if "layers.0.weight" in str(w.message)]) == held
    del state


def test_what_has_run_is_not_run_again() -> None:
    torch.manual_seed(0)
    plain, model = Talks(), make(Talks)
    losses = []
    for each in (plain, model):
        torch.manual_seed(7)
        losses.append(each(torch.eye(8)).detach())
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
    assert len([r for r in caplog.records if r.name == "megacompile.capture"]) == 2, "8, any"
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
