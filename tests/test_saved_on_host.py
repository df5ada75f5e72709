"""Stages that are kept on the host: half of what they save waits there, and is back in time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.test_numbers import assert_same
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.cost.memory import Kind
from megacompile.cost.memory import host_memory as host_bytes_of
from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.offload_saved import offload_saved_tensors
from megacompile.passes.schedule.plan import make_plan, stages_on_host
from megacompile.passes.schedule.recompute import insert_recompute
from megacompile.plan import pipeline
from megacompile.plan.choice import Choice
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from megacompile.plan.scenario import Scenario
from megacompile.plan.stage_groups import stage_groups
from megacompile.plan.tries import Tries
from megacompile.verify.proof import verify
from tests import cases, inside, zoo
from tests.actions import apply, frees, parse, text
from tests.capturing import capture
from tests.test_activations import ORDERS, Two, offloading, pool, trains_alike
from tests.test_planner import problem
from tests.zoo import Stack, batch, loss_of, twins

GIB = 2**30
CPU = torch.device("cpu")
CHAIN = "0F 1F 2F 3F 4F 5F 6F 7F | 7B 6B 5B 4B 3B 2B 1B 0B"


def others(schedule: Schedule) -> frozenset[int]:
    """Every other stage, but for the last ones."""
    able = [stage.index for stage in schedule.stages if stage.traced.has_backward]
    return frozenset(able[:-1:2])


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans keep every other stage on the host, and the last one alone on the device."""

    def make(schedule: Schedule, *, keep: int, **options: Any) -> Schedule:
        there = {**options, "saved_on_host": others(schedule)}
        return make_plan(schedule, keep=min(keep, 1), **there)

    monkeypatch.setattr(pipeline, "make_plan", make)


def waiting(schedule: Schedule) -> list[str]:
    """The values that go to the host."""
    copies = ops.nodes_of(schedule.forward, ops.offload_saved)
    return [ops.arguments(copy)[1].name for copy in copies]


# --- the plan


@pytest.mark.parametrize(
    ("count", "keep", "chosen"),
    [(2, 1, {1, 4}), (3, 1, {1, 3, 5}), (1, 4, {2}), (9, 5, {0, 1, 2}), (9, 1, {0, 1, 2, 3, 4, 5})],
)
def test_they_are_far_from_one_another(count: int, keep: int, chosen: set[int]) -> None:
    """In front of those that are kept, and of those that the backward begins with."""
    found = stages_on_host(parse(CHAIN), count=count, keep=keep, lookahead=1)
    assert found == chosen
    assert not stages_on_host(parse(CHAIN), count=0, keep=keep, lookahead=1)
    assert not stages_on_host(parse(CHAIN), count=count, keep=keep, lookahead=7)


def test_a_plan_keeps_half_of_what_they_save() -> None:
    plan = make_plan(parse(CHAIN), keep=2, saved_on_host=frozenset({0, 2, 4, 7})).plan
    assert plan.keep == {0, 2, 4, 6, 7}, "7 is kept on the device"
    assert plan.offload == {0, 2, 4}
    assert plan.saved_fractions == ((0, 0.5), (2, 0.5), (4, 0.5))
    assert plan.saved_delay == 2, "a copy has the time of two forwards"
    assert plan.reasons[1].startswith("3 stages from 0 to 4 are kept on the host: half")
    other = make_plan(parse(CHAIN), keep=0, saved_on_host=frozenset({0, 2, 4})).plan
    assert not other.keep and not other.saved_fractions, "a backward of other outputs"
    assert other.offload == plan.offload, "which finds the same on the host"


def test_the_next_stage_takes_its_input_from_the_device() -> None:
    plan = Plan(frozenset({1, 3}), offload=frozenset({1}), saved_delay=2)
    schedule = insert_recompute(replace(parse("0F 1F 2F 3F | 3B 2B 1B 0B"), plan=plan))
    schedule = apply(functools.partial(offload_saved_tensors, lookahead=1), schedule)
    assert text(schedule) == (
        "0F 1OFFLOAD_SAVED 1F 1OFFLOAD_SAVED 2F 3F | 3B 1FETCH_SAVED 2RECOMPUTE 2B 1B 0RECOMPUTE 0B"
    )
    freed = frees(insert_free(schedule).forward)
    assert "2F 3F -s1_0(after=1OFFLOAD_SAVED)" in freed, "a forward later than others"


class Rectified(nn.Module):
    """Layers whose backward takes their output."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("both", [False, True])
def test_what_stays_under_another_name_is_not_copied(both: bool) -> None:
    """A relu saves its output. It is on the device for the next stage, or goes as its input."""
    schedule = capture(Rectified(), torch.randn(2, 4)).with_tangent()
    last = len(schedule.stages) - 1
    on_host = frozenset({1, 2} if both else {1})
    for name, function in capture(Rectified(), torch.randn(2, 4)).passes(lookahead=1).items():
        schedule = function(schedule)
        if name == "plan":
            plan = Plan(on_host | {last}, offload=on_host)
            schedule = replace(schedule, plan=plan)
    verify(schedule)
    of_stage = {stage.index: stage for stage in schedule.stages}
    assert of_stage[1].traced.saved, "there is what could be copied"
    names = [name for name in waiting(schedule) if name.startswith("s1_")]
    assert bool(names) == both


# --- numbers


NAMES = ("demo gpt", "batch norm", "shared layer", "tied", "dropout")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("on_host")
def test_bitwise_the_plain_model(name: str) -> None:
    """Two steps, the second of which accumulates into the first."""
    case = cases.build(name)
    plain, model = twins(case.model, lookahead=1)
    for i in range(2):
        for each in (plain, model):
            torch.manual_seed(i)
            case.loss(each, i, CPU).backward()
        assert_same(plain, model)
    for schedule in schedules(model):
        assert others(schedule) <= schedule.plan.keep & schedule.plan.offload
    assert any(name.startswith("s") for each in schedules(model) for name in waiting(each))
    assert pool(model).peak_bytes and not pool(model).lent_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("on_host")
def test_bitwise_on_a_gpu(name: str) -> None:
    """With copies that take time: what is freed too early is somebody else's by then."""
    device = torch.device("cuda")
    case = cases.build(name)
    plain, model = twins(case.model, lookahead=1, device="cuda", resident=0)
    plain.to(device)
    for i in range(3):
        for each in (plain, model):
            torch.manual_seed(i)
            case.loss(each, i, device).backward()
        zoo.assert_same(plain, model)
    assert pool(model).peak_bytes and not pool(model).lent_bytes


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.usefixtures("on_host")
def test_any_order_is_bitwise_the_plain_model(order: Callable[[Any], None]) -> None:
    plain, model = offloading(activations="auto")
    for _ in range(2):
        order(plain)
        order(model)
        zoo.assert_same(plain, model)
    assert not pool(model).lent_bytes
    assert pool(model).held_bytes == pool(model).peak_bytes


@pytest.mark.usefixtures("on_host")
def test_a_backward_of_another_output() -> None:
    torch.manual_seed(0)
    plain, model = twins(Two(), lookahead=1)
    x = batch()["x"]
    for _ in range(2):
        for each in (plain, model):
            each(x)[1].sum().backward()
        zoo.assert_same(plain, model)
    made = [schedule.plan for schedule in schedules(model) if schedule.backward is not None]
    assert len({plan.offload for plan in made}) == 1, "all find it there"


@pytest.mark.usefixtures("on_host")
def test_sizes_that_change() -> None:
    torch.manual_seed(0)
    plain, model = twins(Stack(layers=5), lookahead=1)
    for i, rows in enumerate((4, 7, 2, 7)):
        x = torch.randn(rows, batch()["x"].shape[-1], generator=torch.Generator().manual_seed(i))
        for each in (plain, model):
            each(x).square().mean().backward()
        zoo.assert_same(plain, model)
    assert any(schedule.symbols for schedule in schedules(model))
    assert pool(model).peak_bytes


@pytest.mark.usefixtures("on_host")
def test_updates_in_the_backward() -> None:
    torch.manual_seed(0)
    net = Stack(layers=5)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = megacompile(net, device="cpu", lowering="eager", optimizer=optimizer, lookahead=1)
    trains_alike(plain, model, optimizer)
    assert pool(model).peak_bytes


@pytest.mark.usefixtures("on_host")
@pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O")
def test_it_may_go_on_to_a_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain, model = twins(Stack(layers=5), lookahead=1, disk=tmp_path, disk_saved=True)
    for i in range(2):
        for each in (plain, model):
            loss_of(each(**batch(i))).backward()
        zoo.assert_same(plain, model)
    (schedule,) = schedules(model)
    assert len(ops.nodes_of(schedule.forward, ops.write_saved)) == len(waiting(schedule))
    assert inside.machine(model).saved_disk is not None


# --- the search


def tower(**changes: Any) -> Problem:
    """One in which recomputes take long, and the link has time."""
    found = problem(0, tokens=65536, in_backward=True)
    return replace(found, budget_bytes=int(1.6 * found.floor_bytes()), **changes)


def test_the_sum_is_that_of_the_cost_model() -> None:
    deep = tower()
    for count in (2, 5):
        choice = Choice(2, saved_on_host=count)
        kinds = host_bytes_of(deep.schedule(choice), deep.optimizer)
        assert kinds[Kind.ACTIVATIONS] > 0
        assert deep.host_bytes(choice) == pytest.approx(sum(kinds.values()), abs=8)


def test_the_search_keeps_stages_on_the_host_where_that_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plenty = tower(host_budget_bytes=1000 * GIB)
    found = search(plenty)
    assert found is not None and found.choice.saved_on_host
    assert found.peak_bytes <= plenty.budget_bytes
    assert found.peak_bytes == plenty.memory(found.choice).peak.total_bytes
    needed = plenty.host_bytes(found.choice)
    less = search(tower(host_budget_bytes=needed - 1))
    assert less is not None and less.choice != found.choice
    assert plenty.host_bytes(less.choice) < needed
    pinned = search(replace(plenty, budget_bytes=2 * plenty.budget_bytes), activations_fixed=True)
    assert pinned is not None and not pinned.choice.saved_on_host
    monkeypatch.setattr(Tries, "with_saved_on_host", lambda tries, best: best)
    without = search(tower(host_budget_bytes=1000 * GIB))
    assert without is not None and found.step_s < 0.99 * without.step_s


@pytest.mark.parametrize("stages", [3, 30, 90])
def test_their_number_is_sought_as_exactly_as_it_pays(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that fits saves a step's hundredth: of 30 stages all that fit are found, of 90 all but
    three at most."""
    streamed = Choice(0)
    for most in range(1, stages):
        tries = Tries(cast(Problem, _Short(stages, most)), (0, stages))
        tries.times[streamed] = 100.0

        def kept(best: Choice, count: int, tries: Any = tries, most: int = most) -> Choice:
            choice = replace(best, saved_on_host=count)
            if count > most:
                return best
            tries.times[choice] = 99.0 - count
            return choice

        monkeypatch.setattr(tries, "kept_on_host", kept)
        found = tries.with_saved_on_host(streamed).saved_on_host
        assert most - (3 if stages == 90 else 0) <= found <= most
        assert len(tries.times) <= 2 + 2 * stages.bit_length()


@dataclass
class _Short:
    """Of a problem: how many stages it has, and how many fit on the host."""

    stages: int
    most: int
    budget_bytes: int = 0

    def most_on_host(self, choice: Choice) -> int:
        """A little more than the truth, as estimates are."""
        return min(self.most + 2, self.stages)

    def peak_bytes(self, choice: Choice) -> int:
        return 0

    def again(self, choice: Choice) -> None:
        """There is no room to keep more on the device."""


def test_what_is_shown_of_them() -> None:
    """Stages that alternate are two rows."""
    deep = tower()
    choice = Choice(2, saved_on_host=4)
    schedule = deep.schedule(choice)
    groups = stage_groups(Scenario((schedule,), deep.hardware, deep.optimizer, True, 0))
    assert sum(group.count for group in groups) == len(schedule.stages)
    halves = [group for group in groups if group.treatment.startswith("half kept on the host")]
    assert sum(half.count for half in halves) == 4
    assert any(half.count <= half.last - half.first for half in halves), "others lie between"
