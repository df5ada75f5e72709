"""The search for a plan, and plans that are carried out."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

from megacompile import megacompile, schedules
from megacompile.cost.hardware import H200
from megacompile.cost.memory import device_memory
from megacompile.cost.optimizer import CHUNK_BYTES, CHUNKS, OptimizerCost
from megacompile.cost.simulate import simulate_script
from megacompile.errors import DeviceMemoryError
from megacompile.ir import ops
from megacompile.plan import problem as problem_code
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.compiler import PassCompiler
from megacompile.plan.planner import search, search_near
from megacompile.plan.problem import Problem
from megacompile.plan.tries import Tries, between
from tests.draws import drawn
from tests.inside import residents
from tests.training import adamw, data, net, train
from tests.zoo import assert_same, twins

GIB = 2**30


class Tower(nn.Module):
    """Layers that are large enough for memory to matter, on meta."""

    def __init__(self, depth: int = 12, width: int = 4096) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def problem(budget_bytes: int, tokens: int = 16384, *, in_backward: bool = False) -> Problem:
    """A tower to plan on an H200, as the compiler asks for it."""
    model = Tower().to("meta", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters()) if in_backward else None
    options = abstract_options(device="cpu", state_dtype=torch.float32, optimizer=optimizer)
    inputs = (torch.empty(tokens, 4096, device="meta", dtype=torch.bfloat16),)
    (program,) = abstract_programs(model, inputs, options=options, hardware=H200)
    compiler, planned = program.compiler, program.planned()
    schedule = compiler.pipeline.differentiated(*planned)
    found = compiler.chooser.problem_of(schedule, planned.variant)
    return replace(found, budget_bytes=budget_bytes)


FACTORS = (1.02, 1.2, 1.5, 2, 3, 5, 9)  # of the least that can be done with


def test_more_memory_is_never_slower_and_never_too_much() -> None:
    times = []
    least = problem(GIB).memory(Choice(0)).peak.total_bytes
    for factor in FACTORS:
        budget = int(factor * least)
        tower = problem(budget)
        found = search(tower)
        assert found is not None
        assert found.peak_bytes <= budget
        assert found.peak_bytes == tower.memory(found.choice).peak.total_bytes
        times.append(found.step_s)
    for less, more in zip(times, times[1:], strict=False):
        assert more <= less * 1.011
    assert times[-1] < 0.9 * times[0]


@pytest.mark.parametrize("factor", FACTORS[1:-1])  # at 1.02 a tenth changes everything
def test_with_a_tenth_more_memory_plans_near_the_one_that_was_found_will_do(factor: float) -> None:
    tower = problem(GIB)
    least = tower.memory(Choice(0)).peak.total_bytes
    now = replace(tower, budget_bytes=int(factor * least))
    more = replace(tower, budget_bytes=int(1.1 * factor * least))
    before, whole = search(now), search(more)
    assert before is not None and whole is not None
    near = search_near(more, before.choice)
    assert near is not None and near.peak_bytes <= more.budget_bytes
    assert near.step_s <= 1.011 * before.step_s  # what was found fits here too
    assert near.step_s <= 1.04 * whole.step_s


def test_host_memory_that_was_enough_for_all_that_was_tried() -> None:
    tower = problem(GIB)
    floor = 2 * tower.memory(Choice(0)).peak.total_bytes
    for host_bytes, too_small in ((None, False), (2**40, False), (2 * GIB, True)):
        made = replace(tower, budget_bytes=floor, host_budget_bytes=host_bytes)
        assert search(made) is not None
        assert made.tiers.host_too_small == too_small


@pytest.mark.parametrize(
    ("tokens", "host"),
    [
        (1024, {"update_gb_s": 40.0}),
        pytest.param(8192, {}, marks=pytest.mark.thorough),
        pytest.param(16384, {}, marks=pytest.mark.thorough),
        pytest.param(
            4096,
            {"update_gb_s": 60.0, "host_memory_gb_s": 80.0},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_nor_where_it_hardly_fits_or_the_host_is_slow(tokens: int, host: dict[str, float]) -> None:
    """Offloading more stages can take longer than fewer; residents want fewer device updates."""
    tower = replace(problem(GIB, tokens=tokens), hardware=H200.replace(**host))
    floor, times = tower.floor_bytes(), []
    for factor in (1, 1.1, 1.2, 1.5, 2, 3, 4, 5, 8):
        roomier = replace(tower, budget_bytes=int(factor * floor))
        found = search(roomier)
        assert found is not None and found.peak_bytes <= roomier.budget_bytes
        times.append(roomier.expected_s(found.choice))
    for less, more in zip(times, times[1:], strict=False):
        assert more <= less * 1.011


@pytest.mark.parametrize("factor", [1.5, 2.75, 4])
def test_stages_keep_half_where_that_pays(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backward updates, a third of the step may be computed again. What else frees memory
    is left out: here it brings more."""
    monkeypatch.setattr(Tries, "with_memory_freed", lambda self, best, resident: best)
    tower = problem(GIB, 8192, in_backward=True)
    roomier = [replace(tower, budget_bytes=int(factor * tower.floor_bytes())) for _ in range(2)]
    found = search(roomier[0])
    with mock.patch.object(Tries, "with_halves", lambda self, best, resident: best):
        whole = search(roomier[1])
    assert found is not None and whole is not None and not whole.choice.halves
    assert found.peak_bytes <= roomier[0].budget_bytes
    assert found.step_s <= whole.step_s * (1 + 1e-9)
    if found.choice.halves:
        assert found.choice.keep > whole.choice.keep
        assert roomier[0].expected_s(found.choice) < 0.99 * roomier[1].expected_s(whole.choice)
    else:
        assert found.choice == whole.choice
    assert found.choice.halves == (factor == 2.75), "an example of each"


def test_more_stages_than_may_be_kept_are_known_not_to_fit() -> None:
    """As where a search learns from one that kept more of them."""
    tower = problem(GIB)
    tower = replace(tower, budget_bytes=tower.peak_bytes(Choice(3)))
    assert tower.peak_bytes(Choice(tower.stages)) > tower.budget_bytes
    assert tower.fits(Choice(0))
    assert [tower.most_kept(Choice(0), 0, most) for most in (1, 2, 3, 4)] == [1, 2, 3, 3]


@pytest.mark.parametrize("in_backward", drawn([True], [False]))
def test_passing_over_what_computes_too_long_changes_nothing(in_backward: bool) -> None:
    tower = problem(GIB, in_backward=in_backward)
    least, simulated = tower.memory(Choice(0)).peak.total_bytes, [0, 0]
    for factor in FACTORS:
        roomier = [replace(tower, budget_bytes=int(factor * least)) for _ in range(2)]
        found = search(roomier[0])
        with mock.patch.object(Tries, "_is_in_vain", return_value=False):
            every = search(roomier[1])
        assert found is not None and every is not None
        assert (found.choice, found.step_s) == (every.choice, every.step_s)
        assert found.reasons[1:] == every.reasons[1:]
        for choice, step_s in roomier[1]._steps_s.items():
            assert 0 < roomier[1].least_s(choice) <= step_s * (1 + 1e-9)
        simulated = [n + one.tried for n, one in zip(simulated, (found, every), strict=True)]
    assert simulated[0] < simulated[1] or not in_backward


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_slower_host_is_simulated_where_it_updates(in_backward: bool) -> None:
    tower = problem(64 * GIB, in_backward=in_backward)
    slower = replace(tower, hardware=H200.replace(update_gb_s=1.0))
    with mock.patch.object(problem_code, "simulate_script", wraps=simulate_script) as simulated:
        assert (tower.expected_s(Choice()) == tower.step_s(Choice())) is in_backward
    assert simulated.call_count == (1 if in_backward else 2)
    assert (tower.step_s(Choice()) == slower.step_s(Choice())) is in_backward


def test_rates_may_be_very_small() -> None:
    slow = H200.replace(update_gb_s=1e-12, host_memory_gb_s=1e-12)
    tower = replace(problem(0), hardware=slow)
    assert search(replace(tower, budget_bytes=2 * tower.floor_bytes())) is not None


def test_the_most_residents_that_fit_are_tried(monkeypatch: Any) -> None:
    """Between a number that fits and one that does not, much may happen: a host that has one update
    less to make may be waited for a whole update less."""
    tower = problem(0)
    tower = replace(tower, budget_bytes=int(2.5 * tower.floor_bytes()))
    most = tower.most_residents(Choice(0))
    assert most is not None and 0 < most < len(tower.buckets)
    assert tower.fits(tower.with_residents(most, keep=0))
    assert not tower.fits(tower.with_residents(most + 1, keep=0))
    assert replace(tower, budget_bytes=tower.floor_bytes() // 2).most_residents(Choice(0)) is None
    tried: set[int] = set()
    add = Tries.add

    def noted(self: Tries, choice: Choice, **how: bool) -> bool:
        tried.add(self.count(choice))
        return add(self, choice, **how)

    monkeypatch.setattr(Tries, "add", noted)
    assert search(tower) is not None
    assert most in tried


@pytest.mark.parametrize(
    ("counts", "at", "middles"),
    [
        ([0, 4, 8], 4, {2, 6}),
        ([0, 4, 8], 0, {2}),
        ([21, 22, 44, 66], 21, {33}),
        ([0, 8, 9, 10, 20], 9, {4, 15}),
        ([3, 4], 3, set()),
    ],
)
def test_the_search_goes_on_in_the_nearest_intervals(
    counts: list[int], at: int, middles: set[int]
) -> None:
    """Also where those right beside the best are too narrow: they are as good as the best."""
    assert between(counts, at) == middles


def test_with_room_for_everything_nothing_is_streamed() -> None:
    tower = problem(64 * GIB)
    found = search(tower)
    assert found is not None
    assert found.choice.keep == tower.stages
    assert len(found.choice.resident) == len(tower.buckets)
    assert f"{tower.stages} of {tower.stages} stages are kept" in found.reasons[0]


def test_the_quick_estimate_of_memory_is_an_upper_bound() -> None:
    tower = problem(64 * GIB)
    for count in (0, 3, 12):
        keys = frozenset(bucket.key for bucket in tower.buckets[:count])
        for keep in (0, 1, 6, 12):
            choice = Choice(keep, keys)
            exact = tower.memory(choice).peak.total_bytes
            quick = 64 * GIB - tower._buffer_bytes(choice)
            quick += tower.peak_bytes(Choice(keep, frozenset()))
            more = 3 * tower.buckets[0].size_bytes
            if count == len(tower.buckets):  # the device helps nobody: no memory for that
                more += CHUNKS * CHUNK_BYTES
            assert exact <= quick <= exact + more


def test_what_may_not_be_is_not() -> None:
    found = search(problem(12 * GIB), resident=False, activations_fixed=True)
    assert found is not None and found.choice.keep <= 1 and not found.choice.resident


def test_states_are_fetched_later_where_that_makes_room() -> None:
    """With the update in the backward; else there are no states to fetch."""
    tower = problem(64 * GIB, tokens=1024, in_backward=True)
    early, late = (tower.memory(Choice(0, state_lookahead=k)).peak.total_bytes for k in (None, 1))
    assert late < early
    between = problem((early + late) // 2, tokens=1024, in_backward=True)
    found = search(between, resident=False)
    assert found is not None
    assert found.choice.state_lookahead == 1
    assert late <= found.peak_bytes <= between.budget_bytes
    assert any("1 stage ahead" in reason for reason in found.reasons)
    graph = between.drafts.of(found.choice).backward
    assert graph is not None
    assert ops.actions(graph).split(" 11B ")[0].count("FETCH_STATE") == 2
    assert between.floor_bytes() <= late
    found = search(problem(2 * early, tokens=1024, in_backward=True), resident=False)
    assert found is not None and found.choice.state_lookahead is None
    least = problem(64 * GIB).memory(Choice(0, state_lookahead=1))
    assert least == problem(64 * GIB).memory(Choice(0))


def test_residents_save_copies_where_the_backward_updates() -> None:
    """They cost parameters and states, no gradients."""
    tower = problem(GIB, tokens=4096, in_backward=True)
    least, everywhere = tower.floor_bytes(), frozenset(b.key for b in tower.buckets)
    found = streamed = None
    for factor in (1.02, 1.5, 3):
        roomier = replace(tower, budget_bytes=int(factor * least))
        found, streamed = search(roomier), search(roomier, resident=False)
        assert found is not None and streamed is not None
        assert found.peak_bytes <= roomier.budget_bytes
        assert roomier.expected_s(found.choice) <= roomier.expected_s(streamed.choice) * 1.0021
    assert found is not None and streamed is not None
    assert found.choice.resident and found.step_s < streamed.step_s
    found = search(replace(tower, budget_bytes=64 * GIB))
    assert found is not None and found.choice.resident == everywhere
    assert not ops.nodes_of(_backward(tower, found.choice), ops.update, ops.offload_state)
    sizes = sum(tower.optimizer.resident_bytes(b, range(len(b.params))) for b in tower.buckets)
    numel = sum(param.numel for b in tower.buckets for param in b.params)
    assert sizes == pytest.approx(10 * numel, rel=1e-3)  # bf16, and two moments in float32


def _backward(tower: Problem, choice: Choice) -> fx.Graph:
    graph = tower.drafts.of(choice).backward
    assert graph is not None
    return graph


def test_nothing_is_found_where_the_floor_does_not_fit() -> None:
    assert search(problem(GIB // 4)) is None


# Carried out.


@pytest.mark.parametrize("budget", ["60KiB", "80KiB", "1GiB"])
def test_a_planned_model_trains_like_the_plain_one(budget: str) -> None:
    plain, streamed = twins(net(), gpu_memory=budget)
    for model in (plain, streamed):
        train(model, adamw(model), 4)
    assert_same(plain, streamed)
    (schedule,) = schedules(streamed)
    assert any("of device memory" in reason for reason in schedule.plan.reasons)
    cost = OptimizerCost()
    assert (
        device_memory(schedule, optimizer=cost).peak.total_bytes
        <= {
            "60KiB": 60 * 2**10,
            "80KiB": 80 * 2**10,
            "1GiB": GIB,
        }[budget]
    )
    assert (len(residents(streamed)) == 5) == (budget != "60KiB")


def test_a_choice_can_be_pinned() -> None:
    _, streamed = twins(net(), gpu_memory="1GiB", resident=0)
    train(streamed, adamw(streamed), 2)
    assert residents(streamed) == set()


def test_a_model_that_cannot_fit_says_so_with_the_table() -> None:
    model = megacompile(net(), device="cpu", gpu_memory="1KiB")
    with pytest.raises(
        DeviceMemoryError, match=r"(?s)device memory.*slots.*needed.*available +1 KiB"
    ):
        model(**data(0))


def test_plans_are_compared_on_a_slower_host_too(monkeypatch: Any) -> None:
    """Where updates end just when they are needed, a host of another day would be waited for."""
    tower = problem(0, tokens=8192)
    hardware = H200.replace(update_gb_s=45.0)
    tower = replace(tower, budget_bytes=int(2.4 * tower.floor_bytes()), hardware=hardware)
    sure = search(tower, device_update=False)
    assert sure is not None and sure.step_s == tower.step_s(sure.choice), "as measured"
    monkeypatch.setattr(problem_code, "_SLOWER", 1.0)
    fastest = search(replace(tower), device_update=False)  # which knows of no prediction yet
    assert fastest is not None and fastest.step_s < sure.step_s < 1.05 * fastest.step_s
    monkeypatch.undo()
    slow = problem_code._with_a_slower_host(hardware)
    assert slow.update_gb_s == problem_code._SLOWER * 45
    copies = slow.h2d_both_gb_s + slow.d2h_both_gb_s
    assert copies <= slow.host_memory_gb_s < H200.host_memory_gb_s
    slower = replace(tower, hardware=slow)
    assert slower.step_s(fastest.choice) > 1.05 * slower.step_s(sure.choice)
    mean = (tower.step_s(sure.choice) + slower.step_s(sure.choice)) / 2
    assert tower.expected_s(sure.choice) == pytest.approx(mean)


# Device updates, and slots.


def test_a_share_is_handed_over_where_the_host_is_slow() -> None:
    """With little memory it is better used for updates than for kept stages."""
    tower = problem(0, tokens=4096)
    tower = replace(tower, optimizer=replace(tower.optimizer, helped=False))
    budget = 3 * tower.floor_bytes()
    tower = replace(tower, budget_bytes=budget, hardware=H200.replace(update_gb_s=20.0))
    found = search(tower, resident=False)
    assert found is not None and found.choice.device_update > 0
    assert found.peak_bytes <= budget
    without = search(tower, resident=False, device_update=False)
    assert without is not None and without.choice.device_update == 0
    assert found.step_s < 0.95 * without.step_s


def test_slots_are_added_where_the_link_is_slow() -> None:
    """What stays in a slot from the forward to the backward is not fetched again."""
    tower = problem(0, tokens=64)
    slow = H200.replace(h2d_gb_s=1.0, h2d_both_gb_s=1.0)
    tower = replace(tower, budget_bytes=2 * tower.floor_bytes(), hardware=slow)
    found = search(tower, resident=False, device_update=False)
    assert found is not None and found.choice.more_slots > 0
    assert found.peak_bytes <= tower.budget_bytes
    fewer = search(tower, resident=False, device_update=False, slots=False)
    assert fewer is not None and fewer.choice.more_slots == 0
    assert found.step_s < 0.95 * fewer.step_s


def test_a_few_slots_may_pay_where_one_does_not() -> None:
    """The first two save less than what counts, the fourth one enough."""
    seconds = {0: 1.0, 1: 0.995, 2: 0.992, 4: 0.96, 8: 0.959, 16: 0.5}

    class Slots(Problem):
        def expected_s(self, choice: Choice) -> float:
            return seconds[choice.more_slots]

        step_s = expected_s

        def peak_bytes(self, choice: Choice) -> int:
            return choice.more_slots

    tower = problem(0, tokens=64)
    stub = Slots(tower.drafts, [tower.buckets[0]] * 40, 12, H200, tower.optimizer, budget_bytes=8)
    tries = Tries(stub, (0, 12))
    tries.times[Choice()] = seconds[0]
    assert tries.with_more_slots(Choice()).more_slots == 4
    few = Tries(replace(stub, budget_bytes=2), (0, 12))
    few.times[Choice()] = seconds[0]
    assert few.with_more_slots(Choice()).more_slots == 0


@pytest.mark.parametrize(("given", "more"), [({}, True), ({"slots": 3}, False)])
def test_slots_can_be_pinned(given: dict[str, int], more: bool) -> None:
    options = abstract_options(device="cpu", resident=0, activations="recompute", **given)
    model = Tower().to("meta", torch.bfloat16)
    inputs = (torch.empty(64, 4096, device="meta", dtype=torch.bfloat16),)
    slow = H200.replace(h2d_gb_s=1.0, h2d_both_gb_s=1.0)
    (program,) = abstract_programs(model, inputs, options=options, hardware=slow)
    assert (len(program.schedule().slots) > 3) == more


def test_no_bucket_is_added_to_those_that_are_resident() -> None:
    """They may be any, such as those of another captured graph."""
    tower = problem(64 * GIB)
    there = frozenset({tower.buckets[-1].key})
    found = search(replace(tower, resident=there), resident=False)
    assert found is not None and found.choice.resident == there


@pytest.mark.parametrize(("free", "used"), [(10 * GIB, 9.5 * GIB), (139 * GIB, 135 * GIB)])
def test_a_margin_is_left_that_does_not_grow_for_ever(free: int, used: float) -> None:
    machine = H200.replace(device_bytes=free)
    compiler = PassCompiler(abstract_options(), (), hardware=machine)
    assert compiler.budget.size_bytes() == pytest.approx(used, rel=1e-9)


def test_each_run_finds_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plans that are equally fast too, whatever the order in which sets have them: hashes of
    `None` differ between processes."""
    found = set()
    for salt in range(3):
        monkeypatch.setattr(Choice, "__hash__", lambda choice, s=salt: hash((s, *astuple(choice))))
        tower = problem(GIB)
        result = search(replace(tower, budget_bytes=int(1.3 * tower.floor_bytes())))
        assert result is not None
        found.add(str(astuple(result.choice)))
    assert len(found) == 1
