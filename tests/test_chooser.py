"""Who decides where buckets live, and that it is decided once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megacompile import megacompile
from megacompile.cost.hardware import H200
from megacompile.cost.memory import device_memory
from megacompile.ir.placement import Placement
from megacompile.plan import compiler, planner
from megacompile.plan import searches as searches_code
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.compiler import PassCompiler
from megacompile.runtime.model.buckets import ModelBuckets
from tests.inside import residents
from tests.zoo import assert_same

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

    monkeypatch.setattr(searches_code, "search", search)
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


class Broken(nn.Module):
    """Two captured graphs, each with layers of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, more: bool = True) -> torch.Tensor:
        for layer in self.first:
            x = x + torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in self.second if more else ():
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def two_programs(gpu_memory: int, **options: Any) -> list[AbstractProgram]:
    inputs = (torch.empty(64, WIDTH, device="meta"),)
    made = abstract_programs(
        Broken().to("meta"),
        inputs,
        options=abstract_options(device="cpu", gpu_memory=gpu_memory, **options),
        hardware=H200,
    )
    assert len(made) == 2
    return made


def test_each_graph_decides_about_its_own_buckets(searches: list[Any]) -> None:
    made = two_programs(2**30)
    schedules = [each.schedule() for each in made]
    keys = [{bucket.key for bucket in schedule.buckets} for schedule in schedules]
    assert [schedule.plan.resident for schedule in schedules] == keys
    plans = made[0].plans
    assert plans.placement.resident == keys[0] | keys[1]
    count = len(searches)
    assert count == 2
    for _ in range(2):  # nothing moves again, and nothing is sought again
        plans.compiler.replan()
        assert [each.schedule().plan.resident for each in made] == keys
    assert plans.placement.resident == keys[0] | keys[1]
    assert len(searches) == count


@pytest.mark.parametrize(("layers", "left"), [(4.5, 1), (5.5, 3)])
def test_a_later_graph_takes_what_earlier_ones_leave(layers: float, left: int) -> None:
    """In bytes of layers with gradients and states, beside what streaming takes."""
    size = WIDTH * (WIDTH + 1) * 4
    budget = int(layers * 4 * size + 3 * size)
    made = two_programs(budget, device_update=0.0)
    schedules = [each.schedule() for each in made]
    first, second = (schedule.plan.resident for schedule in schedules)
    assert (len(first), len(second)) == (3, left)
    cost = made[0].compiler.setting.cost()
    assert device_memory(schedules, optimizer=cost).peak.total_bytes <= budget


@pytest.mark.parametrize("in_backward", [False, True], ids=["exact", "in the backward"])
def test_buckets_of_every_graph_move_once(
    monkeypatch: pytest.MonkeyPatch, in_backward: bool
) -> None:
    """Those of one that comes later move later; the run is bitwise that without moves."""
    moves: list[frozenset[int]] = []
    move = ModelBuckets._move

    def counted(self: ModelBuckets, wanted: Placement) -> None:
        moves.append(wanted.resident)
        move(self, wanted)

    monkeypatch.setattr(ModelBuckets, "_move", counted)
    found, places = [], []
    for resident in (0, "auto"):
        torch.manual_seed(0)
        model: Any = Broken(32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        megacompile(
            model,
            device="cpu",
            lowering="eager",
            gpu_memory="1GiB",
            resident=resident,
            optimizer=optimizer if in_backward else None,
        )
        for i in range(6):
            torch.manual_seed(i)
            model(torch.randn(4, 32), more=i >= 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            places.append(len(residents(model)))
        found.append(model)
    assert places == [0] * 6 + [3, 3, 6, 6, 6, 6], "they move when a step begins, or a call"
    assert [len(keys) for keys in moves] == [3, 6]
    assert_same(*found)
