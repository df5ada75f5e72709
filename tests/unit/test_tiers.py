"""Budgets of host and disk: what one has no memory for goes to the other, or is refused."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import HostMemoryError
from megacompile.cost.hardware import H200
from megacompile.cost.memory import MemoryKind, host_memory
from megacompile.cost.stored import disk_memory
from megacompile.ir import ops
from megacompile.ir.schedule import Placement, Schedule, first_to_disk
from megacompile.plan.choice import Choice
from megacompile.plan.planner import SearchResult, search
from megacompile.plan.problem import Problem
from megacompile.plan.settled import SettledPlans
from megacompile.plan.weights_on_disk import search_with_weights
from megacompile.verify.proof import verify
from tests.equality import test_memory_budgets
from tests.planning import (
    DISK,
    GIB,
    MIB,
    MODES,
    captured,
    uneven,
    uneven_problem,
    wide,
    wide_problem,
)


def keys_of(tower: Problem) -> list[int]:
    return [bucket.key for bucket in tower.buckets]


# --- sums


@pytest.mark.parametrize(("in_backward", "dtype"), MODES[1:3])
def test_the_sums_are_those_of_the_cost_model(in_backward: bool, dtype: Any) -> None:
    """Of the host and of the disk, with states, and parameters, of some buckets there."""
    for weights in {False, dtype == "int8"}:
        tower = wide_problem(in_backward, dtype, disk_weights=weights)
        keys = keys_of(tower)
        for resident, stored in ((3, 9), (0, len(keys))):
            choice = Choice(0, frozenset(keys[:resident]), frozenset(keys[len(keys) - stored :]))
            schedule = tower.schedule(choice)
            exact = sum(host_memory(schedule, tower.optimizer).values())
            assert tower.host_bytes(choice) == pytest.approx(exact, abs=8)
            there = sum(disk_memory([schedule], tower.optimizer).values())
            assert tower.tiers.of_disk(choice) == there
            assert len(schedule.plan.on_disk) == stored
    tower = replace(wide_problem(in_backward, dtype), disk_weights=None)
    order = [bucket.key for bucket in first_to_disk(tower.buckets, ())]
    choice = Choice(0, frozenset(order[-3:]), frozenset(order))
    choice = replace(choice, weights_on_disk=frozenset(order[:9]) - choice.resident)
    schedule = tower.schedule(choice)
    assert schedule.plan.weights_on_disk == choice.weights_on_disk
    exact = sum(host_memory(schedule, tower.optimizer).values())
    assert tower.host_bytes(choice) == pytest.approx(exact, abs=8)
    assert tower.tiers.of_disk(choice) == sum(disk_memory([schedule], tower.optimizer).values())


def test_saved_tensors_and_other_graphs_count_too() -> None:
    tower = uneven_problem()
    for count, offload in ((3, 2), (len(tower.buckets), 0), (0, tower.stages)):
        choice = replace(tower.with_residents(count), offload=offload)
        kinds = host_memory(tower.schedule(choice), tower.optimizer)
        assert bool(kinds.get(MemoryKind.ACTIVATIONS)) == bool(offload)
        assert tower.host_bytes(choice) == pytest.approx(sum(kinds.values()), abs=8)
    tower, choice = wide_problem(), Choice(0, offload=9, saved_on_disk=4)
    exact = sum(host_memory(tower.schedule(choice), tower.optimizer).values())
    assert tower.host_bytes(choice) == pytest.approx(exact, abs=8)
    assert replace(tower, elsewhere_bytes=5).host_bytes(Choice()) == tower.host_bytes(Choice()) + 5


# --- the host's budget


@pytest.mark.parametrize("share", [0.4, 0.0])
def test_less_host_memory_means_more_residents(share: float) -> None:
    """And no more than that takes."""
    budget = int(share * uneven_problem().host_bytes(Choice()))
    tower = uneven_problem(host_budget_bytes=budget)
    found = search(tower)
    assert found is not None and tower.host_bytes(found.choice) <= budget
    assert tower.memory(found.choice).peak.total_bytes <= tower.budget_bytes
    least = tower.fewest_residents()
    assert least is not None and 0 < least <= len(found.choice.resident)
    assert not tower.fits_host(tower.with_residents(least - 1))


def test_budgets_that_are_no_limits_change_nothing() -> None:
    rich = wide_problem(True, host_budget_bytes=1000 * GIB)
    for tower, other in (
        (uneven_problem(), uneven_problem(host_budget_bytes=1000 * GIB)),
        (rich, replace(rich, disk_budget_bytes=None)),
    ):
        found, limited = search(tower), search(other)
        assert found is not None and limited is not None
        assert found.choice == limited.choice and not found.choice.on_disk


def test_inputs_wait_on_the_host_where_the_device_is_too_small() -> None:
    """As few as must; that is memory of the host too."""
    tower = uneven_problem()
    all_here, none_here = (
        tower.memory(Choice(0, offload=n)).peak.total_bytes for n in (0, tower.stages)
    )
    between = replace(tower, budget_bytes=(all_here + none_here) // 2)
    few = between.fewest_offloaded(Choice(0))
    assert few is not None and 0 < few < tower.stages
    assert between.memory(Choice(0, offload=few)).peak.total_bytes <= between.budget_bytes
    assert between.memory(Choice(0, offload=few - 1)).peak.total_bytes > between.budget_bytes
    assert replace(tower, budget_bytes=none_here - 1).fewest_offloaded(Choice(0)) is None
    tight = replace(tower, budget_bytes=tower.floor_bytes())
    found = search(tight, resident=False)
    assert found is not None and found.choice.offload
    exact = tower.host_bytes(found.choice)
    assert search(replace(tight, host_budget_bytes=exact), resident=False) is not None


def test_stages_run_again_where_the_host_has_too_little_for_their_outputs() -> None:
    """One where that is enough; every other one; longer rows; then nothing is left to try."""
    tower = uneven_problem()
    tight = replace(tower, budget_bytes=tower.floor_bytes())
    few, half = tight.fewest_offloaded(Choice(0)), tower.reruns(1)
    assert few is not None
    waiting = Choice(0, offload=few)
    least = tower.host_bytes(waiting)

    def found(host_bytes: int) -> Choice | None:
        result = search(replace(tight, host_budget_bytes=host_bytes), resident=False)
        if result is not None:
            assert tower.host_bytes(result.choice) <= host_bytes
            assert tower.memory(result.choice).peak.total_bytes <= tight.budget_bytes
        return None if result is None else result.choice

    one = found(least - 1)
    assert one is not None and one.rerun == 1
    most = tower.host_bytes(replace(waiting, rerun=half))
    assert replace(tight, host_budget_bytes=most - 1).fewest_reruns(waiting) is None

    def needed(again: int) -> int:
        fewer = tight.fewest_offloaded(Choice(0, rerun=again))
        assert fewer is not None
        return tower.host_bytes(Choice(0, rerun=again, offload=fewer))

    rows = {again: needed(again) for again in range(half, tower.stages)}
    assert min(rows.values()) < rows[half]
    long = found(min(rows.values()))
    assert long is not None and long.rerun > half
    assert found(min(rows.values()) - 1) is None


def test_an_optimizer_that_nobody_knows_yet_may_have_fewer_states() -> None:
    """SGD fits, AdamW does not. It is said."""
    compiler, params = uneven().compiler, sum(b.size_bytes for b in uneven_problem().buckets)
    options = replace(compiler.setting.options, resident=0, gpu_memory=4 * GIB, tiles=1)
    other = type(compiler)(options, compiler.pipeline.units, host_bytes=int(2.2 * params))
    with pytest.warns(UserWarning, match="states"):
        SettledPlans(other).schedule(*uneven().planned())


# --- which states lie on the disk


@pytest.mark.parametrize(
    ("in_backward", "dtype", "share"), [(*MODES[0], 1.0), (*MODES[3], 1.0), (*MODES[2], 0.6)]
)
def test_as_few_states_as_it_takes(in_backward: bool, dtype: Any, share: float) -> None:
    plenty = wide_problem(in_backward, dtype)
    tower = replace(plenty, host_budget_bytes=int(share * plenty.host_bytes(Choice())))
    found = search(tower)
    if found is None:  # masters and gradients alone are too much
        assert not tower.fits_host(tower.tightest())
        return
    choice = found.choice
    assert tower.fits_host(choice)
    assert tower.memory(choice).peak.total_bytes <= tower.budget_bytes
    for key in choice.on_disk:
        assert not tower.fits_host(replace(choice, on_disk=choice.on_disk - {key}))


def test_where_host_memory_is_not_known_all_lie_there_that_the_disk_holds() -> None:
    tower = wide_problem()
    streamed = tower.settled(Choice())
    assert streamed.on_disk == {*keys_of(tower)}
    needed = tower.tiers.of_disk(streamed)
    small = replace(tower, disk_budget_bytes=needed // 2)
    assert 0 < small.tiers.of_disk(small.settled(Choice())) <= needed // 2


@pytest.mark.parametrize("in_backward", [False, True])
def test_which_states(in_backward: bool) -> None:
    """The last ones; in the backward as far from one another as can be. Large ones come last."""
    tower = wide_problem(in_backward)
    order, size = keys_of(tower), tower.host_bytes(Choice())
    seen = 0
    for budget in range(size, size // 2, -size // 40):
        small = replace(tower, host_budget_bytes=budget)
        places = sorted(order.index(key) for key in small.settled(Choice()).on_disk)
        if len(places) < 2 or 0 in places or 1 in places:
            continue
        seen += 1
        gaps = {b - a for a, b in itertools.pairwise(places)}
        if in_backward:
            assert max(gaps) - min(gaps) <= 1
        else:
            assert gaps == {1} and places[-1] == len(order) - 1
    assert seen > 3


def test_the_largest_live_on_the_device_before_most_others() -> None:
    """Slots are as large as the largest bucket that is streamed."""
    tower = wide_problem(True)
    last = replace(tower, undecided=[*tower.buckets[2:], *tower.buckets[:2]])
    largest = max(tower.buckets, key=lambda bucket: bucket.size_bytes).key
    four, first = last.with_residents(4).resident, [b.key for b in last.candidates]
    assert largest in four and four >= {*first[:3]}
    assert replace(last, disk_budget_bytes=None).with_residents(4).resident == {*first[:4]}


def test_residents_that_need_no_slots_are_more() -> None:
    """The estimate of what fits counts slots as if everything were streamed; beyond it a few more
    are tried exactly."""
    tower = wide_problem(True, "int8")
    device, host = int(1.1 * tower.floor_bytes()), int(0.3 * tower.host_bytes(Choice()))
    tower = replace(tower, budget_bytes=device, host_budget_bytes=host)
    more = search(tower)
    assert more is not None and not tower.fits(more.choice)
    assert more.peak_bytes <= device and tower.host_bytes(more.choice) <= host


# --- which parameters


def test_parameters_go_where_states_are_not_enough() -> None:
    """As few as it takes; none, where a plan fits without, and where the search may not choose."""
    tower = replace(wide_problem(True, "int8"), disk_weights=None)
    here = replace(tower, disk_weights=False)
    every = tower.host_bytes(Choice(0))

    def fits(budget: int) -> bool:
        small = replace(here, host_budget_bytes=budget)
        return small.fits_host(small.settled(Choice(0)))

    least = bisect.bisect_left(range(every), True, key=fits)  # that states on the disk make enough
    order = [bucket.key for bucket in first_to_disk(tower.buckets, ())]
    size = min(bucket.size_bytes for bucket in tower.buckets)
    found = []
    for budget in (least + GIB, least, least - 1, least - 3 * size, least - 8 * size):
        settled = replace(tower, host_budget_bytes=budget).settled(Choice(0))
        found.append(len(settled.weights_on_disk))
        assert settled.weights_on_disk == frozenset(order[: found[-1]])
        assert tower.host_bytes(settled) <= budget
        if found[-1]:
            fewer = replace(settled, weights_on_disk=frozenset(order[: found[-1] - 1]))
            assert tower.host_bytes(fewer) > budget
    assert found[:2] == [0, 0] and 0 < found[2] < found[3] < found[4] < len(order)
    small = replace(here, host_budget_bytes=least - 8 * size)
    assert not small.settled(Choice(0)).weights_on_disk
    two = frozenset(order[2:4])  # already there
    assert replace(small, weights_on_disk=two).settled(Choice(0)).weights_on_disk == two


def test_the_disk_is_a_budget_of_parameters_too() -> None:
    tower = replace(wide_problem(host_budget_bytes=GIB // 4), disk_weights=None)
    states = tower.tiers.of_disk(Choice(0, on_disk=frozenset(keys_of(tower))))
    largest = max(bucket.size_bytes for bucket in tower.buckets)
    for left in (0, largest, 3 * largest):
        small = replace(tower, disk_budget_bytes=states + left)
        assert small.tiers.of_disk(small.settled(Choice(0))) <= states + left
        assert not small.fits_host(small.settled(Choice(0)))


def test_which_parameters_come_first() -> None:
    """Frozen ones, far from one another; then trained ones; then large ones."""
    tower = wide_problem()
    keys = keys_of(tower)
    first, second, *equal = keys
    trained = {first, *equal[::2]}
    order = [bucket.key for bucket in first_to_disk(tower.buckets, trained)]
    assert sorted(order) == sorted(keys) and {*order[-2:]} == {first, second}
    assert {*order[: len(equal) // 2]} == {*equal[1::2]}
    free = sorted(keys.index(bucket.key) for bucket in first_to_disk(tower.buckets, ())[:4])
    assert min(b - a for a, b in itertools.pairwise(free)) >= len(equal) // 5
    assert first_to_disk([], ()) == []


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_device_leaves_to_the_host_what_comes_from_the_disk(in_backward: bool) -> None:
    """But for updates in the backward. The schedule is proved as one that runs is."""
    made = wide(in_backward)
    planned, pipeline = made.planned(), made.compiler.pipeline
    graphs = pipeline.differentiated(*planned)
    every = frozenset(bucket.key for bucket in graphs.buckets)
    stored = frozenset(bucket.key for bucket in first_to_disk(graphs.buckets, ())[:9])
    for on_disk in (frozenset[int](), every):
        share = 0.0 if in_backward else 0.5
        choice = Choice(0, on_disk=on_disk, device_update=share, weights_on_disk=stored)
        schedule = pipeline.planned(graphs, planned.variant, choice)
        verify(schedule)
        assert schedule.plan.weights_on_disk == stored
        helped = [update for node in _helps(schedule) for update in node.args[0]]
        keys = {ops.arguments(update)[0].key for update in helped} | schedule.plan.device_update
        assert not keys & (stored | on_disk)
        assert bool(keys) == (not in_backward and not on_disk)


def _helps(schedule: Schedule) -> list[Any]:
    """The ops with which the device helps the host."""
    found = (ops.nodes_that(graph, lambda op: op.helps) for graph in schedule.graphs.values())
    return [node for each in found for node in each]


class Timed(Problem):
    """With saved tensors on the disk a step takes 2 s, with parameters there `WEIGHTS_S`."""

    def step_s(self, choice: Choice) -> float:
        return WEIGHTS_S[0] if choice.weights_on_disk else 2.0

    expected_s = step_s


WEIGHTS_S = [1.0]


@pytest.mark.parametrize("faster", [True, False])
def test_saved_tensors_or_parameters(faster: bool) -> None:
    """Where one of them has to be on the disk, the faster plan; nothing is sought without need."""
    WEIGHTS_S[0] = 1.0 if faster else 3.0
    plain = wide_problem()
    given = {name: getattr(plain, name) for name in ("drafts", "buckets", "stages", "hardware")}
    tower = Timed(**given, optimizer=plain.optimizer, budget_bytes=GIB)
    saved = Choice(0, offload=9, saved_on_disk=4)
    weights = Choice(0, weights_on_disk=frozenset({tower.buckets[3].key}))
    asked = []

    def seek(problem: Problem) -> SearchResult:
        asked.append(problem.disk_weights)
        return SearchResult(weights, WEIGHTS_S[0], 0, 1, ())

    _, best = search_with_weights(tower, SearchResult(saved, 2.0, 0, 1, ()), seek)
    assert asked == [None] and best is not None
    assert best.choice == (weights if faster else saved)
    assert ("2000 ms" in " ".join(best.reasons)) == faster
    alone = SearchResult(Choice(0), 2.0, 0, 1, ())
    assert search_with_weights(tower, alone, seek) == (tower, alone)
    assert asked == [None], "a plan fits"


class Loss(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_buckets_that_stay_do_not_go_to_the_disk(tmp_path: Path) -> None:
    """Nor come from there. Where they may go, as few go as it takes."""
    layers = test_memory_budgets.made(base=True)
    host_memory = int(1.85 * test_memory_budgets.size_of(layers))
    given: dict[str, Any] = {"gpu_memory": GIB, "resident": 0, "disk": tmp_path}
    model, shape = nn.Sequential(layers, Loss()), (4, test_memory_budgets.WIDTH)
    given |= {"lowering": "eager", "host_memory": host_memory, "hardware": DISK}
    (made,) = captured(model, *shape, dtype=torch.float32, **given)
    planned, stays = made.planned(), Placement(stays="a hook is on a node")
    with pytest.raises(HostMemoryError):
        made.compiler.choose(*planned, stays)
    assert not made.compiler.wants(stays).weights_on_disk
    every = frozenset(bucket.key for bucket in made.stages.buckets)
    there = replace(stays, weights_on_disk=every)
    assert made.compiler.choose(*planned, there).weights_on_disk == every
    (moved,) = captured(model, *shape, dtype=torch.float32, **given)
    plan = moved.schedule().plan
    assert 0 < len(plan.weights_on_disk) < len(every) == len(plan.on_disk)


# --- refused


def refused(made: Any, host_bytes: int, disk_bytes: int | None, **given: Any) -> list[str]:
    """The lines of the error."""
    options = replace(made.compiler.setting.options, tiles=1)
    if disk_bytes is not None:
        options = replace(options, disk="/absent", disk_memory=disk_bytes)
    hardware = (H200 if disk_bytes is None else DISK).replace(host_bytes=host_bytes)
    other = made.compiler.other(options, hardware=hardware, **given)
    with pytest.raises(HostMemoryError) as raised:
        SettledPlans(other).schedule(*made.planned())
    return str(raised.value).splitlines()


def test_what_fits_nowhere_is_refused() -> None:
    """With a table, and with what would do."""
    needed = uneven_problem().host_bytes(Choice())
    lines = refused(uneven(), needed // 40, None, budget_bytes=GIB)
    assert [line.split()[0] for line in lines[1:4]] == ["parameters", "gradients", "optimizer"]
    device = 856 * MIB  # enough for every bucket streamed, and for none to live there
    budget = int(0.8 * wide_problem(budget_bytes=device).host_bytes(Choice()))
    without = refused(wide(), budget, None, budget_bytes=device)
    assert any(line.startswith("with disk=") for line in without)
    small = refused(wide(), budget, 64 * MIB, budget_bytes=device)
    assert any("more of the disk" in line for line in small)
