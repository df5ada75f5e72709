"""Where buckets are placed, the memory that plans may use, and drafts; budgets of host and disk.

The first plan that reads a bucket places it, once. Drafts predict what the schedules of their
choices do: their models are shapes alone (meta), planned for an H200 as the compiler asks for it.
What does not fit on the host goes to the disk, or is refused, with the plan that lacks the least.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.cost.memory import device_memory
from megacompile.cost.places import disk_memory, host_memory
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.plan import Choice, Placement, Places, Tier, first_to_disk
from megacompile.ir.schedule import Schedule
from megacompile.plan.planner import nearest, search
from megacompile.plan.problem import DEVICE, DISK, HOST, Problem
from megacompile.verify.proof import hazards
from tests.equality.nets import Applies
from tests.planned import (
    GIB,
    MODES,
    captured,
    equal_layers,
    of_sizes,
    problem_of,
    uneven_problem,
    wide_problem,
    with_drive,
)
from tests.unit.test_planner import Block
from tests.zoo import Tower

WIDTH = 1024


def program(layers: int = 4, width: int = WIDTH, tokens: int = 64, **options: Any) -> Any:
    """A model whose buckets all fit on the device by default."""
    (made,) = captured(equal_layers(layers, width), tokens, width, dtype=torch.float32, **options)
    return made


def sought(made: Any) -> Any:
    """The result of the last search."""
    every = made.compiler.chooser._planned.values()
    (planned,) = [planned for planned in every if planned.problem.stages > 1]
    return planned.found


def test_buckets_go_where_the_plan_wants_them_once() -> None:
    made = program(gpu_memory=GIB)
    schedule = made.schedule()
    found = sought(made)
    assert found.choice.places.resident, "all of it fits"
    assert schedule.plan.resident == found.choice.places.resident
    assert made.plans.placement == Placement(found.choice.places)
    made.compiler.chooser.forget()
    assert made.schedule().plan == schedule.plan and sought(made) is found, "nothing is sought anew"


def broken(model: Any, x: Tensor) -> Tensor:
    """Two captured graphs with different layers."""
    for layer in model.first:
        x = x + torch.tanh(layer(x))
    torch._dynamo.graph_break()
    for layer in model.second:
        x = x + torch.tanh(layer(x))
    return x.square().mean()


def two_programs(gpu_memory: int, **options: Any) -> list[Any]:
    first, second = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(2))
    model = Applies(broken, first=first, second=second)
    return captured(model, 64, WIDTH, dtype=torch.float32, gpu_memory=gpu_memory, **options)


@pytest.mark.parametrize(("layers", "left"), [(4.5, 1), (5.5, 3)])
def test_a_later_graph_takes_what_earlier_ones_leave(layers: float, left: int) -> None:
    """Memory is in layers, with gradients and states, next to the memory of streaming."""
    size = WIDTH * (WIDTH + 1) * 4
    budget = int(layers * 4 * size + 3 * size)
    made = two_programs(budget, device_update=0.0)
    schedules = [each.schedule() for each in made]
    assert [len(schedule.plan.resident) for schedule in schedules] == [3, left]
    assert problem_of(made[1]).elsewhere_bytes == 0, "nothing else is on the host"
    cost = made[0].compiler.setting.cost()
    assert device_memory(schedules, optimizer=cost).peak.total_bytes <= budget


def test_the_rest_of_a_step_is_an_update_alone() -> None:
    """It updates buckets that no schedule trains."""
    made = program()
    one, other, *_ = made.schedule().buckets
    schedule = made.compiler.rest([one, other], Placement(Places.of({other.key})))
    assert ops.actions(schedule.update) == "0UPDATE 0.1UPDATE HELP_HOST"
    assert list(map(ops.label, ops.returned(schedule.update)[0])) == ["0UPDATE", "0.1UPDATE"]
    assert hazards(schedule) == []


def test_less_is_nine_tenths_of_what_was_needed_and_never_less_than_the_smallest_plan() -> None:
    """Stepping down ends at the smallest plan."""
    made = program(8, gpu_memory=GIB)
    budget = made.compiler.chooser.budget
    assert made.compiler.step_down() == "" and budget.size_bytes() == GIB, "nothing was planned"
    peaks, placements = list[int](), list[Any]()
    while True:
        made.compiler.chooser.forget()
        schedule = made.schedule()
        cost = made.compiler.setting.cost()
        peaks.append(device_memory([schedule], optimizer=cost).peak.total_bytes)
        placements.append(made.plans.placement.places.resident)
        before = budget.size_bytes()
        more = before - peaks[-1]  # than is planned, for code that is not fused
        assert budget.room(0) == budget.room(peaks[-1]) == more and budget.room(before + 1) == -1
        assert peaks[-1] <= before and len(peaks) < 50
        if not made.compiler.step_down():
            break
        assert budget.size_bytes() >= int(0.9 * peaks[-1])
        assert made.compiler.step_down() == "", "nothing was planned with it yet"
    assert budget.size_bytes() == before and len(peaks) > 3
    assert peaks == sorted(peaks, reverse=True) and placements[-1] < placements[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lowering": "eager"}, "Python calls each operator anyway"),
        ({"activations": "recompute"}, "stages are there to be computed again"),
        ({"resident": 2}, "buckets are streamed"),
        ({"tiles": 2}, "tiles are of a stage"),
        ({"in_backward": True}, "gradients do not stay"),
        ({"detect_anomaly": True}, "an error names the stage"),
        ({"width": 4096, "tokens": 2**16}, "the device is busy for longer than Python"),
        ({"width": 64, "tokens": 2**16, "gpu_memory": 180 * 2**20}, "all of it does not fit"),
    ],
)
def test_stages_stay_apart_where_that_is_better(options: dict[str, Any], why: str) -> None:
    schedule = program(**{"width": 64, "tokens": 8, **options}).schedule()
    assert len(schedule.stages) > 1, why
    assert not any("run as one" in reason for reason in schedule.plan.reasons)


CHOICES = (
    Choice(0),
    Choice(4, device_update=0.4),
    Choice(4, halves=True),
    Choice(3, saved_on_host=2),
    Choice(0, offload=6, rerun=True),
    Choice(2, tiles=4, saved_on_host=2),
)


@functools.cache
def problem(in_backward: bool, dropout: float) -> Any:
    model = nn.Sequential(*(nn.Sequential(Block(1024), nn.Dropout(dropout)) for _ in range(6)))
    (program,) = captured(model, 4, 2048, 1024, in_backward=in_backward, state_dtype=torch.float32)
    return problem_of(program)


def predicted(schedule: Schedule, of: Any) -> dict[str, object]:
    """Everything that a search asks a draft."""
    cost = of.optimizer
    memory = device_memory(schedule, optimizer=cost)
    timeline = simulate(schedule, of.hardware, optimizer=cost, steps=3)
    return {
        "plan": schedule.plan,
        "memory": [(m.graph, m.label, dict(m.live_bytes)) for m in memory.moments],
        "end": dict(memory.end),
        "host": host_memory(schedule, cost),
        "events": timeline.events,
        "step_s": timeline.step_s,
    }


@pytest.mark.parametrize(("in_backward", "dropout"), [(False, 0.0), (True, 0.1)])
def test_a_draft_predicts_what_the_schedule_of_its_choice_does(
    in_backward: bool, dropout: float
) -> None:
    """Whatever was drafted before."""
    asked = problem(in_backward, dropout)
    drafts = asked.drafts
    before = ops.actions(drafts.graphs.forward), len(drafts.graphs.forward.nodes)
    for choice in CHOICES[3:] if in_backward else CHOICES[:4]:
        drafts.waiting(choice)
        wanted = predicted(drafts.pipeline.planned(drafts.graphs, drafts.variant, choice), asked)
        made = predicted(drafts.of(choice), asked)
        assert drafts.of(choice).plan == wanted["plan"], "the second of what is kept"
        for what, value in wanted.items():
            assert made[what] == value, (choice, what)
    assert (ops.actions(drafts.graphs.forward), len(drafts.graphs.forward.nodes)) == before


@functools.cache
def deep(disk_saved: bool | None = None) -> Any:
    """With a disk of 100 GiB."""
    # little to train, and large values between layers
    tower = Tower((nn.Linear(512, 512) for _ in range(20)), lambda layer, x: layer(x).relu())
    options: dict[str, Any] = {"activations": "offload", "disk": {"disk_saved": disk_saved}}
    (made,) = captured(tower, 2**18, 512, hardware=with_drive(3.0), **options)
    return problem_of(made, budget_bytes=3 * GIB, disk_budget_bytes=100 * GIB)


def test_as_little_goes_to_a_disk_as_it_takes() -> None:
    """All states first, then as few saved tensors as necessary; none if even all are not enough."""
    plain = deep()
    every = Choice(0, Places.of(on_disk=[bucket.key for bucket in plain.buckets]))
    states, counts = int(plain.host_bytes(every)), []
    for missing in (0.0, 0.3, 2.0, 9.0):
        tight = replace(plain, host_budget_bytes=int(states - missing * GIB))
        choice = tight.settled(Choice(0))
        counts.append(choice.saved_on_disk)
        if 0 < missing < 9:
            assert len(choice.places.on_disk) == len(plain.buckets) and tight.fits_host(choice)
            assert not tight.fits_host(replace(choice, saved_on_disk=choice.saved_on_disk - 1))
    assert counts[0] == counts[-1] == 0 and 0 < counts[1] < counts[2] < 20
    never = replace(deep(False), host_budget_bytes=states - GIB)
    assert not never.settled(Choice(0)).saved_on_disk
    small = replace(plain, host_budget_bytes=states - GIB, disk_budget_bytes=GIB)
    for nothing in (never, small):
        assert not nothing.fits_host(nothing.settled(Choice(0)))
    schedule = deep(True).schedule(Choice(0))
    assert schedule.plan.saved_on_disk == schedule.plan.offload


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


@cache
def small_problem() -> Problem:
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
    whole = small_problem()
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
