"""The search for a plan, for a tower on an H200 and for toys small enough to try every choice."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.cost.hardware import H200
from megacompile.errors import ModelError
from megacompile.ir import ops
from megacompile.ir.plan import Choice, Placement, Places
from megacompile.plan.abstract import AbstractProgram, abstract_programs
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from tests import quantized
from tests.draws import drawn
from tests.planned import GIB, captured, problem, problem_of
from tests.zoo import Tower

LITTLE = 1.011  # what plans may differ by


def floor_of(made: Problem) -> int:
    return made.memory(Choice(0)).peak.total_bytes


def as_kind(kind: type[Problem], like: Problem) -> Any:
    return kind(**{each.name: getattr(like, each.name) for each in fields(like) if each.init})


class Patient(Problem):
    """A problem without lower bounds, so that the search skips nothing."""

    def least_s(self, choice: Choice) -> float:
        return 0.0


@pytest.mark.parametrize(
    "how",
    drawn(
        [(16384, None, False), (16384, None, True)],
        # offloading more stages can take longer than fewer; residents want fewer device updates
        [(1024, 40.0, False), (8192, 160.0, False)],
    ),
)
def test_more_device_memory_is_never_slower_and_never_too_much(
    how: tuple[int, float | None, bool],
) -> None:
    tokens, update_gb_s, in_backward = how
    tower = problem(GIB, tokens, in_backward=in_backward)
    if update_gb_s is not None:
        tower = replace(tower, hardware=H200.replace(update_gb_s=update_gb_s))
    least, times = floor_of(tower), []
    for factor in (1.02, 2.5, 5):  # of the least that can be done with
        roomier = replace(tower, budget_bytes=int(factor * least))
        found = search(roomier)
        assert found is not None and found.peak_bytes <= roomier.budget_bytes
        assert found.peak_bytes == roomier.memory(found.choice).peak.total_bytes
        times.append(roomier.expected_s(found.choice))
    for less, more in itertools.pairwise(times):
        assert more <= less * LITTLE
    assert update_gb_s is not None or times[-1] < 0.9 * times[0]


def test_nothing_changes_that_choices_are_passed_over_whose_computes_take_too_long() -> None:
    tower = problem(GIB, in_backward=True)
    tower = replace(tower, budget_bytes=int(2.5 * floor_of(tower)))
    patient = as_kind(Patient, tower)
    hasty, every = search(as_kind(Problem, tower)), search(patient)
    assert hasty is not None and every is not None and hasty.tried < every.tried
    assert (hasty.choice, hasty.step_s) == (every.choice, every.step_s)
    for choice, step_s in patient._steps_s.items():
        assert Problem.least_s(patient, choice) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "how", drawn([(1.3, True)], [(2.5, False), (1.3, False), (2.5, True), (3.2, False)])
)
def test_more_host_memory_is_never_slower(how: tuple[float, bool]) -> None:
    """Little host memory means more residents, for which stages run again."""
    factor, in_backward = how
    tower = problem(GIB, in_backward=in_backward)
    floor, needed = tower.floor_bytes(), tower.host_bytes(Choice())
    times = []
    for share in (0.3, 0.6, 3):
        device, host = int(factor * floor), int(share * needed)
        made = replace(tower, budget_bytes=device, host_budget_bytes=host)
        if (found := search(made)) is not None:
            times.append(made.expected_s(found.choice))
    assert times
    for less, more in itertools.pairwise(times):
        assert more <= less * LITTLE


def test_what_may_not_be_is_not_and_rates_may_be_very_small() -> None:
    assert search(problem(GIB // 4)) is None, "the floor does not fit"
    found = search(problem(12 * GIB), resident=False, activations_fixed=True)
    assert found is not None and found.choice.keep <= 1 and not found.choice.places.resident
    slow = replace(problem(0), hardware=H200.replace(update_gb_s=1e-12, host_memory_gb_s=1e-12))
    assert search(replace(slow, budget_bytes=2 * slow.floor_bytes())) is not None


@pytest.mark.parametrize("in_backward", [False, True])
def test_with_room_for_everything_nothing_is_streamed(in_backward: bool) -> None:
    tower = problem(64 * GIB, tokens=4096, in_backward=in_backward)
    found = search(tower)
    assert found is not None and found.choice.keep == tower.stages
    assert len(found.choice.places.resident) == len(tower.buckets)
    if in_backward:  # nothing comes back
        graph = tower.schedule(found.choice).graphs["backward"]
        assert not ops.nodes_of(graph, ops.update, ops.offload_state)
        numel = sum(param.numel for bucket in tower.buckets for param in bucket.params)
        taken = tower.resident_bytes(found.choice.places.resident, gradients=False)
        assert taken == pytest.approx(10 * numel, rel=1e-3)  # bf16, and two moments in float32
    else:  # and no bucket joins those of another graph
        there = frozenset({tower.buckets[-1].key})
        others = search(replace(tower, here=Places.of(there)), resident=False)
        assert others is not None and others.choice.places.resident == there


class Whole(Problem):
    """A problem in which halves never fit."""

    def peak_bytes(self, choice: Choice) -> int:
        return 2 * self.budget_bytes if choice.halves else super().peak_bytes(choice)


def test_stages_keep_half_where_that_pays() -> None:
    """A third of a step may be recomputed, and the link has no time for saved tensors."""
    slow = H200.replace(d2h_gb_s=2.0, d2h_both_gb_s=2.0)
    tower = problem_of(captured(tower_of_blocks(), 8, 1024, 512)[0], hardware=slow)
    tower = replace(tower, budget_bytes=2 * tower.floor_bytes())
    found, whole = search(tower), search(as_kind(Whole, tower))
    assert found is not None and whole is not None and not whole.choice.halves
    assert found.choice.halves and found.choice.keep > whole.choice.keep
    assert found.peak_bytes <= tower.budget_bytes
    assert tower.expected_s(found.choice) < 0.99 * tower.expected_s(whole.choice)


def test_states_are_fetched_later_where_that_makes_room() -> None:
    """States are fetched only with the update in the backward."""
    tower = problem(64 * GIB, tokens=1024, in_backward=True)
    early, late = (tower.memory(Choice(0, state_lookahead=k)).peak.total_bytes for k in (None, 1))
    assert late < early and tower.floor_bytes() <= late
    between_both = replace(tower, budget_bytes=(early + late) // 2)
    found = search(between_both, resident=False)
    assert found is not None and found.choice.state_lookahead == 1
    assert late <= found.peak_bytes <= between_both.budget_bytes
    graph = between_both.schedule(found.choice).graphs["backward"]
    assert ops.actions(graph).split(" 11B ")[0].count("FETCH_STATE") == 2
    found = search(replace(tower, budget_bytes=2 * early), resident=False)
    assert found is not None and found.choice.state_lookahead is None
    exact = problem(64 * GIB)
    assert exact.memory(Choice(0, state_lookahead=1)) == exact.memory(Choice(0))


class AsMeasured(Problem):
    """A problem without a slower host."""

    def expected_s(self, choice: Choice) -> float:
        return self.step_s(choice)


def test_plans_are_compared_on_a_slower_host_too() -> None:
    """A plan whose updates end just in time would wait for a slower host."""
    hardware = H200.replace(update_gb_s=45.0)
    tower = problem(0, tokens=8192)
    tower = replace(tower, budget_bytes=2 * tower.floor_bytes(), hardware=hardware)
    sure = search(tower, device_update=False)
    fastest = search(as_kind(AsMeasured, tower), device_update=False)
    assert sure is not None and fastest is not None
    assert sure.step_s == tower.step_s(sure.choice)
    assert fastest.step_s < sure.step_s < 1.05 * fastest.step_s
    assert tower.expected_s(sure.choice) < 0.99 * tower.expected_s(fastest.choice)


PAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # with little memory it is better used for updates than for kept stages
    "device_update": ({"tokens": 4096}, {"hardware": H200.replace(update_gb_s=20.0)}),
    # they cost parameters and states, no gradients
    "resident": ({"tokens": 4096, "in_backward": True}, {}),
}


@pytest.mark.parametrize("what", PAYS)
def test_memory_goes_where_it_pays(what: str) -> None:
    """To device updates for a slow host, residents in the backward."""
    how, changes = PAYS[what]
    tower = replace(problem(0, **how), **changes)
    tower = replace(tower, optimizer=replace(tower.optimizer, helped=False))
    tower = replace(tower, budget_bytes=3 * tower.floor_bytes())
    given = {"resident": what == "resident"}
    found, fewer = search(tower, **given), search(tower, **{**given, what: False})
    assert found is not None and fewer is not None
    chosen, others = (
        getattr(each.choice.places if what == "resident" else each.choice, what)
        for each in (found, fewer)
    )
    assert chosen and not others
    assert found.peak_bytes <= tower.budget_bytes
    assert found.step_s < (1.0 if what == "resident" else 0.95) * fewer.step_s


class Block(nn.Module):
    """Attention that takes most of the time, and an MLP that takes most of the memory."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, -1, 128)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.down(F.silu(self.up(x)))


def tower_of_blocks() -> Tower:
    return Tower(Block() for _ in range(5))


@cache
def long(in_backward: bool) -> AbstractProgram:
    return captured(tower_of_blocks(), 1, 131072, 512, in_backward=in_backward)[0]


def planned(made: AbstractProgram, device_bytes: int) -> tuple[float, Choice]:
    """The expected time of a step, and its choice."""
    machine = H200.replace(host_bytes=64 * GIB)
    options = made.compiler.setting.options
    other = made.compiler.other(options, hardware=machine, budget_bytes=device_bytes)
    each = made.planned()
    graphs = other.pipeline.differentiated(*each)
    found, _ = other.chooser.choose(each, graphs, Placement())
    return other.chooser.problem(graphs, each.variant).expected_s(found), found


@pytest.mark.parametrize("in_backward", drawn([False], [True]))
def test_tiles_where_they_fit_or_pay(in_backward: bool) -> None:
    made = long(in_backward)
    whole = problem_of(made)
    floor = whole.floor_bytes()
    times, tiles = [], []
    for factor in (0.6, 2.5):
        step_s, choice = planned(made, int(factor * floor))
        times.append(step_s)
        tiles.append(choice.tiles)
    assert tiles[0] > 1, "it fits in tiles alone"
    assert tiles[-1] > 1, "and is faster so in any case"
    for less, more in itertools.pairwise(times):
        assert more <= less * 1.04  # tiles must save 3 %
    step_s, choice = planned(made, 64 * GIB)
    if not in_backward:
        assert choice.keep == whole.stages and choice.tiles == 1, "where all is kept"
        assert step_s == whole.expected_s(choice)


class Toy(AsMeasured):
    """A problem with the costs of the current toy, `COSTS`."""

    def memory(self, choice: Choice) -> Any:
        mine = self.resident_bytes(choice.places.resident, gradients=self.gradients_stay)
        peak = COSTS["floor"] + mine + choice.keep * COSTS["saved"]
        return SimpleNamespace(peak=SimpleNamespace(total_bytes=int(peak)))

    def peak_bytes(self, choice: Choice) -> int:
        known = self._known(choice)
        known[choice.keep] = self.memory(choice).peak.total_bytes
        return known[choice.keep]

    def step_s(self, choice: Choice) -> float:
        streamed = len(self.buckets) - len(choice.places.resident)
        copies = COSTS["copy_s"] * 2 * streamed
        computes = COSTS["compute_s"] * (4 * self.stages - choice.keep)
        host = COSTS["host_s"] * streamed * (1 - choice.device_update)
        return max(computes + 0.3 * choice.device_update * streamed, copies, host) + 0.1 * host


COSTS: dict[str, float] = {}


def test_toys_get_about_the_best_of_all_choices() -> None:
    """The search is compared with all choices of residents, kept stages and shares, for 20 toys."""
    tower = problem(0)
    size = tower.resident_bytes({tower.buckets[0].key}, gradients=False)
    shares = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)
    for seed in range(20):
        rng = random.Random(seed)
        COSTS.update({name: rng.uniform(0.1, 3) for name in ("copy_s", "compute_s", "host_s")})
        COSTS.update(floor=size, saved=size * rng.uniform(0.05, 2))
        budget = int(size * rng.uniform(1, 20))
        toy = as_kind(Toy, replace(tower, budget_bytes=budget))
        found = search(toy)
        assert found is not None and found.peak_bytes <= budget
        keys = [bucket.key for bucket in toy.buckets]
        choices = (
            Choice(keep, Places.of(keys[:count]), device_update=share)
            for keep in range(toy.stages + 1)
            for count in range(len(keys) + 1)
            for share in shares
        )
        best = min(toy.step_s(each) for each in choices if toy.peak_bytes(each) <= budget)
        assert found.step_s <= 1.05 * best, (seed, found.choice)


def test_a_plan_knows_the_leaves_of_wrappers() -> None:
    """It has the buckets and inputs of the real run, and does not change the model."""
    with pytest.raises(ModelError):  # a class that wraps no tensors
        abstract_programs(quantized.model(quantized.OWN["state"]), (torch.arange(8).view(1, 8),))
    model = quantized.model(quantized.OWN["wrapper"])
    before = [id(param) for param in model.parameters()]
    (program,) = abstract_programs(model, (torch.arange(16).view(2, 8),))
    plan = program.schedule()
    assert [id(param) for param in model.parameters()] == before
    streamed = megacompile(model, device="cpu", lowering="eager")
    quantized.trained(streamed, steps=1)
    (schedule,) = schedules(streamed)
    assert [b.size_bytes for b in plan.buckets] == [b.size_bytes for b in schedule.buckets]
    for one, other in zip(plan.stages, schedule.stages, strict=True):
        assert [bucket.name for bucket in one.buckets] == [b.name for b in other.buckets]
        assert len(one.primals) == len(other.primals)
    trained = {bucket.key for bucket in plan.buckets if "layers" in bucket.name}
    assert plan.gradient_params.keys() == trained
