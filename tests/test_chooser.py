"""Who decides where buckets live, and that it is decided once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megacompile.cost.hardware import H200
from megacompile.ir.placement import Placement
from megacompile.plan import chooser, compiler, planner
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.compiler import PassCompiler

WIDTH = 1024


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def program() -> AbstractProgram:
    """A model whose buckets all fit on the device."""
    inputs = (torch.empty(64, WIDTH, device="meta"),)
    (made,) = abstract_programs(
        Tower().to("meta"),
        inputs,
        options=abstract_options(device="cpu", gpu_memory=2**30),
        hardware=H200,
    )
    return made


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every search found."""
    found: list[Any] = []

    def search(*args: Any, **kwargs: Any) -> Any:
        found.append(planner.search(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(chooser, "search", search)
    return found


def test_buckets_go_where_the_plan_wants_them(searches: list[Any]) -> None:
    """And then the same is not sought again."""
    made = program()
    schedule = made.schedule()
    (found,) = searches
    assert found.choice.resident, "all of it fits"
    assert schedule.plan.resident == found.choice.resident
    assert made.plans.placement == Placement(found.choice.resident)
    assert made.schedule().plan == schedule.plan
    assert len(searches) == 1


def test_other_buckets_than_it_wanted_are_planned_for(searches: list[Any]) -> None:
    made = program()
    made.compiler.plan(*made.planned(), Placement())
    made.compiler.replan()
    (key, *_) = searches[0].choice.resident
    schedule = made.compiler.plan(*made.planned(), Placement(frozenset({key})))
    assert len(searches) == 2
    assert schedule.plan.resident == {key}
    assert made.compiler.wants(Placement()) == Placement(), "the first decides, and was given up"


def test_a_schedule_is_for_the_buckets_where_they_are() -> None:
    made = program()
    schedule = made.compiler.plan(*made.planned(), Placement())
    assert schedule.plan.resident == frozenset()
    assert made.compiler.wants(Placement()) != Placement()


def test_what_was_decided_outlives_a_build_that_was_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else no later plan would decide, and nothing would ever move."""
    made = program()

    def interrupted(schedule: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "verify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.compiler.plan(*made.planned(), Placement())
    assert made.compiler.wants(Placement()).resident


def test_buckets_that_stay_are_not_asked_for(searches: list[Any]) -> None:
    made = program()
    placement = Placement(stays="a hook is on a node")
    schedule = made.compiler.plan(*made.planned(), placement)
    assert made.compiler.wants(placement) == placement
    assert schedule.plan.resident == frozenset()
    assert "buckets stay where they are: a hook is on a node" in schedule.plan.reasons


def test_with_less_memory_it_is_decided_anew(searches: list[Any]) -> None:
    made = program()
    made.schedule()
    before = made.plans.placement
    less: PassCompiler = made.compiler
    assert less.step_down().startswith("at most ")
    less.replan()
    made.schedule()
    assert len(searches) > 1
    assert made.plans.placement.resident < before.resident
