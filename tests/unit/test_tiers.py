"""Budgets of host and disk: what does not fit on the host goes to the disk, or is refused.

A refusal shows the plan that lacks the least memory, and the changes that would make it fit.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megacompile.cost.places import disk_memory, host_memory
from megacompile.ir import ops
from megacompile.ir.plan import Choice, Places, Tier, first_to_disk
from megacompile.ir.schedule import Schedule
from megacompile.plan.planner import nearest, search
from megacompile.plan.problem import DEVICE, DISK, HOST, Problem
from megacompile.verify.proof import verify
from tests.planned import (
    GIB,
    MODES,
    captured,
    of_sizes,
    problem_of,
    uneven_problem,
    wide,
    wide_problem,
)


def keys_of(tower: Problem) -> list[int]:
    return [bucket.key for bucket in tower.buckets]


def check_sums(tower: Problem, choice: Choice) -> Schedule:
    """The sums equal the cost model's for the choice's schedule."""
    schedule = tower.schedule(choice)
    host = sum(host_memory(schedule, tower.optimizer).values())
    assert tower.host_bytes(choice) == pytest.approx(host, abs=8)
    assert tower.disk_bytes(choice) == sum(disk_memory([schedule], tower.optimizer).values())
    return schedule


@pytest.mark.parametrize(("in_backward", "dtype"), MODES[1:3])
def test_the_sums_are_those_of_the_cost_model(in_backward: bool, dtype: Any) -> None:
    """Sums of host and disk, with states and parameters of some buckets on the disk."""
    tower = wide_problem(in_backward, dtype, disk_weights=dtype == "int8")
    keys = keys_of(tower)
    choice = Choice(0, Places.of(keys[:3], keys[len(keys) - 9 :]))
    assert len(check_sums(tower, choice).plan.on_disk) == 9
    tower = replace(wide_problem(in_backward, dtype), disk_weights=None)
    order = [bucket.key for bucket in first_to_disk(tower.buckets, ())]
    choice = Choice(0, Places.of(order[-3:], order, order[:9]))
    assert check_sums(tower, choice).plan.places.weights_on_disk == {*order[:9]}


def test_saved_tensors_and_other_graphs_count_too() -> None:
    tower = uneven_problem()
    for count, offload in ((3, 2), (len(tower.buckets), 0)):
        check_sums(tower, replace(tower.with_residents(count), offload=offload))
    check_sums(wide_problem(), Choice(0, offload=9, saved_on_disk=4))
    assert replace(tower, elsewhere_bytes=5).host_bytes(Choice()) == tower.host_bytes(Choice()) + 5


def test_less_host_memory_means_more_residents() -> None:
    """The fewest that are necessary."""
    budget = int(0.4 * uneven_problem().host_bytes(Choice()))
    tower = uneven_problem(host_budget_bytes=budget)
    found = search(tower)
    assert found is not None and tower.host_bytes(found.choice) <= budget
    assert tower.memory(found.choice).peak.total_bytes <= tower.budget_bytes
    least = tower.fewest_residents()
    assert least is not None and 0 < least <= len(found.choice.places.resident)
    assert not tower.fits_host(tower.with_residents(least - 1))


def test_inputs_wait_on_the_host_where_the_device_is_too_small() -> None:
    """As few as necessary, because they take host memory."""
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


def test_every_other_stage_runs_again_where_the_host_has_too_little_for_their_outputs() -> None:
    tower = uneven_problem()
    tight = replace(tower, budget_bytes=tower.floor_bytes())
    few, fewer = (tight.fewest_offloaded(Choice(0, rerun=again)) for again in (False, True))
    assert few is not None and fewer is not None
    least = tower.host_bytes(Choice(0, offload=few))
    again = tower.host_bytes(Choice(0, offload=fewer, rerun=True))
    assert again < least
    for host_bytes in (least, least - 1, again):
        found = search(replace(tight, host_budget_bytes=host_bytes), resident=False)
        assert found is not None and found.choice.rerun >= (host_bytes < least)
        assert tower.host_bytes(found.choice) <= host_bytes
        assert tower.memory(found.choice).peak.total_bytes <= tight.budget_bytes
    assert search(replace(tight, host_budget_bytes=again - 1), resident=False) is None


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
    for key in choice.places.on_disk:
        back = choice.places.changed([key], states=Tier.HOST)
        assert not tower.fits_host(replace(choice, places=back))


@pytest.mark.parametrize("in_backward", [False, True])
def test_which_states(in_backward: bool) -> None:
    """The last ones or, for updates in the backward, evenly spread ones. Large ones come last."""
    tower = wide_problem(in_backward)
    order, size = keys_of(tower), tower.host_bytes(Choice())
    seen = 0
    for budget in range(size, size // 2, -size // 40):
        small = replace(tower, host_budget_bytes=budget)
        places = sorted(order.index(key) for key in small.settled(Choice()).places.on_disk)
        if len(places) < 2 or 0 in places or 1 in places:
            continue
        seen += 1
        gaps = {b - a for a, b in itertools.pairwise(places)}
        if in_backward:
            assert max(gaps) - min(gaps) <= 1
        else:
            assert gaps == {1} and places[-1] == len(order) - 1
    assert seen > 3


def test_parameters_go_where_states_are_not_enough() -> None:
    """As few as necessary; none if a plan fits without, or if options forbid it."""
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
        stored = settled.places.weights_on_disk
        found.append(len(stored))
        assert stored == {*order[: found[-1]]}
        assert tower.host_bytes(settled) <= budget
        if found[-1]:
            fewer = settled.places.changed([order[found[-1] - 1]], weights=Tier.HOST)
            assert tower.host_bytes(replace(settled, places=fewer)) > budget
    assert found[:2] == [0, 0] and 0 < found[2] < found[3] < found[4] < len(order)
    small = replace(here, host_budget_bytes=least - 8 * size)
    assert not small.settled(Choice(0)).places.weights_on_disk
    states = tower.disk_bytes(Choice(0, Places.of(on_disk=order)))
    for left in (0, 3 * size):  # the disk is a budget too
        full = replace(tower, host_budget_bytes=GIB // 4, disk_budget_bytes=states + left)
        assert full.disk_bytes(full.settled(Choice(0))) <= states + left
        assert not full.fits_host(full.settled(Choice(0)))
    all_stored = Choice(0, Places.of(on_disk=order))
    for lacks in (0, 1):  # it may be filled to the byte
        full = replace(tower, host_budget_bytes=None, disk_budget_bytes=states - lacks)
        assert full.fits_host(all_stored) == (not lacks)
    two = Places.of(weights_on_disk=order[2:4])  # already there
    there = replace(small, here=two).settled(Choice(0)).places
    assert there.weights_on_disk == two.weights_on_disk


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_device_leaves_to_the_host_what_comes_from_the_disk(in_backward: bool) -> None:
    """Except for updates in the backward. The schedule is verified too."""
    made = wide(in_backward)
    planned, pipeline = made.planned(), made.compiler.pipeline
    graphs = pipeline.differentiated(*planned)
    every = frozenset(bucket.key for bucket in graphs.buckets)
    stored = frozenset(bucket.key for bucket in first_to_disk(graphs.buckets, ())[:9])
    for on_disk in (frozenset[int](), every):
        share = 0.0 if in_backward else 0.5
        places = Places.of(on_disk=on_disk, weights_on_disk=stored)
        choice = Choice(0, places, device_update=share)
        schedule = pipeline.planned(graphs, planned.variant, choice)
        verify(schedule)
        assert schedule.plan.weights_on_disk == stored
        helps = [ops.nodes_that(g, lambda op: op.helps) for g in schedule.graphs.values()]
        args: list[Any] = [node.args[0] for each in helps for node in each]
        helped = [update for each in args for update in each]
        keys = {ops.arguments(update)[0].key for update in helped} | schedule.plan.device_update
        assert not keys & (stored | on_disk)
        assert bool(keys) == (not in_backward and not on_disk)


@cache
def problem() -> Problem:
    """With many tokens."""
    sizes = (2048, 4096, 2048, 4096)
    return problem_of(captured(of_sizes(*sizes), 4096, 2048, state_dtype=torch.float32)[0])


def more(tower: Problem, lacks: dict[str, int]) -> Problem:
    """With what is lacking."""
    host, disk = tower.host_budget_bytes, tower.disk_budget_bytes
    return replace(
        tower,
        budget_bytes=tower.budget_bytes + lacks.get(DEVICE, 0),
        host_budget_bytes=None if host is None else host + lacks.get(HOST, 0),
        disk_budget_bytes=None if disk is None else disk + lacks.get(DISK, 0),
    )


@pytest.mark.parametrize("device", [0.05, 0.3])
@pytest.mark.parametrize(("host", "disk"), [(0.02, None), (0.3, 0.1), (None, 0.1)])
def test_with_what_is_lacking_it_fits(
    device: float, host: float | None, disk: float | None
) -> None:
    whole = problem()
    size = whole.host_bytes(Choice())
    tower = replace(
        whole,
        budget_bytes=int(device * whole.peak_bytes(Choice(0))),
        host_budget_bytes=None if host is None else int(host * size),
        disk_budget_bytes=None if disk is None else int(disk * size),
    )
    found = nearest(tower)
    lacks = tower.lacking(found)
    enough = more(tower, lacks)
    assert not enough.lacking(found)
    if search(tower) is None:
        assert lacks
        assert sum(lacks.values()) <= sum(tower.lacking(tower.tightest()).values())
        assert enough.fits_host(found) and enough.peak_bytes(found) <= enough.budget_bytes
