"""Parameters that go to the disk because the plan says so: as few as it takes, the same numbers."""

from __future__ import annotations

import bisect
import copy
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import (
    DiskError,
    HostMemoryError,
    explain,
    megacompile,
    schedules,
    unmegacompile,
)
from megacompile.cost.memory import host_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.stored import disk_memory
from megacompile.ir import ops
from megacompile.ir.placement import Placement, first_to_disk
from megacompile.ir.schedule import Schedule
from megacompile.options import Options
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.planner import SearchResult
from megacompile.plan.problem import Problem
from megacompile.plan.weights_on_disk import search_with_weights
from megacompile.verify.proof import verify
from tests import inside, test_disk_placement
from tests.test_disk_placement import DISK, GIB, MODES

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

LAYERS, WIDTH = 24, 64


def chosen(in_backward: bool, dtype: Any, **changes: Any) -> Problem:
    """As the search has it that finds nothing without parameters on the disk."""
    return replace(test_disk_placement.problem(in_backward, dtype, **changes), disk_weights=None)


@pytest.mark.parametrize(("in_backward", "dtype"), MODES)
def test_the_sums_are_those_of_the_cost_model(in_backward: bool, dtype: Any) -> None:
    tower = chosen(in_backward, dtype)
    order = [bucket.key for bucket in first_to_disk(tower.buckets, ())]
    every = frozenset(order)
    for resident, stored in ((0, 1), (3, 9), (0, len(order))):
        choice = Choice(
            0, frozenset(order[-resident:] if resident else ()), every, weights_on_disk=every
        )
        choice = replace(choice, weights_on_disk=frozenset(order[:stored]) - choice.resident)
        schedule = tower.schedule(choice)
        assert schedule.plan.weights_on_disk == choice.weights_on_disk
        exact = sum(host_memory(schedule, tower.optimizer).values())
        assert tower.host_bytes(choice) == pytest.approx(exact, abs=8)
        assert tower.tiers.of_disk(choice) == sum(disk_memory([schedule], tower.optimizer).values())


@pytest.mark.parametrize(("in_backward", "dtype"), MODES)
def test_as_few_as_it_takes(in_backward: bool, dtype: Any) -> None:
    """Behind states; where a plan fits without, there are none."""
    tower = chosen(in_backward, dtype)
    here = replace(tower, disk_weights=False)
    every = tower.host_bytes(Choice(0))

    def fits(budget: int) -> bool:
        small = replace(here, host_budget_bytes=budget)
        return small.fits_host(small.settled(Choice(0)))

    least = bisect.bisect_left(range(every), True, key=fits)  # that states on the disk make enough
    order = [bucket.key for bucket in first_to_disk(tower.buckets, ())]
    small = min(bucket.size_bytes for bucket in tower.buckets)
    found = []
    for budget in (least + GIB, least, least - 1, least - 3 * small, least - 8 * small):
        settled = replace(tower, host_budget_bytes=budget).settled(Choice(0))
        found.append(len(settled.weights_on_disk))
        assert settled.weights_on_disk == frozenset(order[: found[-1]])
        assert tower.host_bytes(settled) <= budget
        for count in range(found[-1]):
            fewer = replace(settled, weights_on_disk=frozenset(order[:count]))
            assert tower.host_bytes(fewer) > budget
    assert found[:2] == [0, 0] and 0 < found[2] < found[3] < found[4] < len(order)


def test_the_disk_is_a_budget_of_theirs_too() -> None:
    tower = chosen(False, torch.float32, host_budget_bytes=GIB // 4)
    every = frozenset(bucket.key for bucket in tower.buckets)
    states = tower.tiers.of_disk(Choice(0, on_disk=every))
    largest = max(bucket.size_bytes for bucket in tower.buckets)
    for left in (0, largest, 3 * largest):
        small = replace(tower, disk_budget_bytes=states + left)
        assert small.tiers.of_disk(small.settled(Choice(0))) <= states + left
        assert not small.fits_host(small.settled(Choice(0)))


def test_they_stay_where_the_search_may_not_choose() -> None:
    tower = chosen(True, "int8", host_budget_bytes=GIB // 4)
    assert tower.settled(Choice(0)).weights_on_disk
    assert not replace(tower, disk_weights=False).settled(Choice(0)).weights_on_disk
    two = frozenset(bucket.key for bucket in tower.buckets[2:4])
    already = replace(tower, disk_weights=False, weights_on_disk=two)
    assert already.settled(Choice(0)).weights_on_disk == two


def test_which_come_first() -> None:
    """Frozen ones, far from one another; then trained ones; then large ones."""
    tower = chosen(False, torch.float32)
    keys = [bucket.key for bucket in tower.buckets]
    wide, narrow, *equal = keys
    trained = {wide, *equal[::2]}
    order = [bucket.key for bucket in first_to_disk(tower.buckets, trained)]
    assert sorted(order) == sorted(keys)
    assert {*order[-2:]} == {wide, narrow}
    assert {*order[: len(equal) // 2]} == {*equal[1::2]}
    free = [keys.index(bucket.key) for bucket in first_to_disk(tower.buckets, ())[:4]]
    gaps = [b - a for a, b in itertools.pairwise(sorted(free))]
    assert min(gaps) >= len(equal) // 5
    assert first_to_disk([], ()) == []


@pytest.mark.parametrize(("in_backward", "dtype"), MODES)
def test_the_device_leaves_to_the_host_what_comes_from_the_disk(
    in_backward: bool, dtype: Any
) -> None:
    """But for updates in the backward. The schedule is proved as one that runs is."""
    made = test_disk_placement.program(in_backward, dtype)
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
        helped = [update for node in helps(schedule) for update in node.args[0]]
        keys = {ops.arguments(update)[0].key for update in helped} | schedule.plan.device_update
        assert not keys & (stored | on_disk)
        assert bool(keys) == (not in_backward and not on_disk)


def helps(schedule: Schedule) -> list[Any]:
    """The ops with which the device helps the host."""
    found = (ops.nodes_that(graph, lambda op: op.helps) for graph in schedule.graphs.values())
    return [node for each in found for node in each]


@pytest.mark.parametrize("faster", [True, False])
def test_saved_tensors_or_parameters(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """Where one of them has to be on the disk, the faster plan."""
    tower = test_disk_placement.problem()
    saved = Choice(0, offload=9, saved_on_disk=4)
    weights = Choice(0, weights_on_disk=frozenset({tower.buckets[3].key}))
    times = {saved: 2.0, weights: 1.0 if faster else 3.0}
    asked = []

    def search(problem: Problem) -> SearchResult:
        asked.append(problem.disk_weights)
        return SearchResult(weights, times[weights], 0, 1, ())

    monkeypatch.setattr(Problem, "expected_s", lambda self, choice: times[choice])
    monkeypatch.setattr(Problem, "step_s", lambda self, choice: times[choice])
    found = SearchResult(saved, 2.0, 0, 1, ())
    _, best = search_with_weights(tower, found, search)
    assert asked == [None] and best is not None
    assert best.choice == (weights if faster else saved)
    assert ("it would take 2000 ms" in " ".join(best.reasons)) == faster
    alone = SearchResult(Choice(0), 2.0, 0, 1, ())
    assert search_with_weights(tower, alone, search) == (tower, alone)
    assert asked == [None], "nothing else is sought where a plan fits"


class Layer(nn.Module):
    """A base with a trained vector in the middle of it."""

    def __init__(self, base: bool) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH).requires_grad_(base) for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu() + self.shift)
        return out


def made(*, base: bool) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(base) for _ in range(LAYERS)))


def size_of(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def trained(model: Any, optimizer: Any, steps: int = 3) -> list[Tensor]:
    losses = []
    for k in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def on_disk(model: Any) -> list[str]:
    return [name for name, bucket in inside.buckets(model).items() if bucket.on_disk is not None]


def pair(
    folder: Path, share: float, *, base: bool, in_backward: bool = False, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """A plain model and one whose host memory is a share of its parameters, with optimizers."""
    plain = made(base=base)
    model = copy.deepcopy(plain)
    first, second = (
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01)
        for each in (plain, model)
    )
    options = {"gpu_memory": "1GiB", "resident": 0, "disk": folder, **options}
    options["host_memory"] = int(share * size_of(model))
    if in_backward:
        options["optimizer"] = second
        megacompile(plain, device="cpu", lowering="eager", optimizer=first)  # in its arithmetic
    megacompile(model, device="cpu", lowering="eager", **options)
    return plain, first, model, second


def equal(plain: nn.Module, model: nn.Module) -> bool:
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# the share of the parameters that host memory holds: how many buckets have theirs on the disk as
# megacompile() returns, and behind the first call
NONE = range(1)
BUDGETS = {
    "all stays, states too": (True, False, 4.5, NONE, NONE),
    "states go": (True, False, 2.5, NONE, NONE),
    "the plan sends them": (True, False, 1.85, NONE, range(9, 24)),
    "the plan sends them, in the backward": (True, True, 0.97, range(1, 4), range(9, 20)),
    "a frozen base stays": (False, False, 1.2, NONE, NONE),
    "a frozen base, which the plan brings back": (False, False, 1.03, range(1, 3), NONE),
    "a frozen base goes at once, and more with the plan": (
        False,
        False,
        0.8,
        range(5, 8),
        range(14, 15),
    ),
    "nearly all of a frozen base": (False, True, 0.5, range(12, 16), range(18, 24)),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_the_same_numbers_wherever_they_lie(tmp_path: Path, name: str) -> None:
    base, in_backward, share, at_once, planned = BUDGETS[name]
    plain, first, model, second = pair(tmp_path, share, base=base, in_backward=in_backward)
    limit = inside.machine(model).host_budget.limit_bytes
    assert len(on_disk(model)) in at_once
    losses = trained(model, second)
    there = on_disk(model)
    assert len(there) in planned
    (schedule,) = schedules(model)
    labels = {
        bucket.name for bucket in schedule.buckets if bucket.key in schedule.plan.weights_on_disk
    }
    assert labels == {*there}
    held = inside.machine(model).host_budget.held_bytes
    needed = sum(host_memory(schedule, OptimizerCost.of(inside.streamed(model).options)).values())
    assert limit is not None and needed <= limit and held <= limit
    assert torch.equal(torch.stack(losses), torch.stack(trained(plain, first)))
    assert equal(plain, model)
    unmegacompile(model)
    assert equal(plain, model)


@pytest.mark.filterwarnings("ignore:megacompile. host memory .* does not hold")
@pytest.mark.parametrize(("share", "amsgrad"), [(1.7, False), (1.85, True), (2.5, True)])
def test_a_step_that_needs_more_than_the_plan_counted_changes_nothing(
    tmp_path: Path, share: float, amsgrad: bool
) -> None:
    """AdamW where the plan has one state a parameter, or its third state, which no plan counts."""
    plain, _, model, _ = pair(tmp_path, share, base=True)
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01, amsgrad=amsgrad)
        trained(each, optimizer, 1)
    x = torch.randn(4, WIDTH)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for _ in range(2):
        with pytest.raises(HostMemoryError, match="states of .* which lie on a disk.* more"):
            optimizer.step()
        assert equal(plain, model)
    states = optimizer.state_dict()["state"].values()
    assert all(int(each["step"]) == 1 and each["exp_avg"].isfinite().all() for each in states)
    model(x).square().mean().backward()


def test_what_fits_otherwise_stays(tmp_path: Path) -> None:
    """Buckets live on the device, where it has memory for them."""
    *_, model, optimizer = pair(tmp_path, 1.85, base=True, resident="auto")
    trained(model, optimizer, 1)
    (schedule,) = schedules(model)
    assert schedule.plan.resident and not schedule.plan.weights_on_disk and not on_disk(model)


def test_why_is_said(tmp_path: Path) -> None:
    *_, model, optimizer = pair(tmp_path, 1.85, base=True)
    trained(model, optimizer, 1)
    said = explain(model, changes=False)
    reasons = " ".join(said.reasons)
    assert "no other plan fits: host memory does not hold all parameters beside the rest" in reasons
    count = len(on_disk(model))
    assert f"the parameters of {count} buckets (" in reasons and ") lie on a disk: " in reasons
    assert said.disk is not None and said.disk.kinds["parameters"] > 0
    assert said.host.fits and said.disk.fits


def test_plan_says_what_megacompile_does(tmp_path: Path) -> None:
    """`plan` has a model of shapes; the options are the same."""
    *_, model, optimizer = pair(tmp_path, 1.85, base=True)
    trained(model, optimizer, 1)
    shapes = made(base=True).to("meta")
    given = {"gpu_memory": "1GiB", "resident": 0, "disk": tmp_path, "lowering": "eager"}
    options = abstract_options(device="cpu", host_memory=int(1.85 * size_of(model)), **given)
    x = torch.empty(4, WIDTH, device="meta")
    (program,) = abstract_programs(
        nn.Sequential(shapes, Loss()), (x,), options=options, hardware=DISK
    )
    plan = program.schedule().plan
    (run,) = schedules(model)
    assert len(plan.weights_on_disk) == len(run.plan.weights_on_disk) > 0
    assert len(plan.on_disk) == len(run.plan.on_disk) == LAYERS
    assert "no other plan fits: host memory does not hold" in " ".join(plan.reasons)


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_false_is_never(tmp_path: Path) -> None:
    """The refusal names what would do, which is then done."""
    *_, model, optimizer = pair(tmp_path, 1.85, base=True, disk_weights=False)
    with pytest.raises(HostMemoryError) as error:
        trained(model, optimizer, 1)
    assert "without disk_weights=False it would fit: " in str(error.value)
    assert not on_disk(model)
    with pytest.raises(HostMemoryError, match="host_memory is"):
        pair(tmp_path, 0.8, base=False, disk_weights=False)


def test_a_disk_that_is_too_small_for_what_the_host_has_no_room_for(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"disk_memory=32 KiB is too small"):
        pair(tmp_path, 0.8, base=False, disk_memory="32KiB")
    size = size_of(made(base=True))
    *_, model, optimizer = pair(
        tmp_path, 0.97, base=True, in_backward=True, disk_memory=int(2.1 * size)
    )
    with pytest.raises(HostMemoryError) as error:
        trained(model, optimizer, 1)
    assert "more of the disk it would fit (disk_memory=, or a larger disk)" in str(error.value)
    assert "disk_weights" not in str(error.value)


def test_what_is_on_meta_goes_where_there_is_room(tmp_path: Path) -> None:
    def filled(**options: Any) -> Any:
        model = made(base=False).to("meta")
        torch.manual_seed(3)
        return megacompile(model, device="cpu", lowering="eager", disk=tmp_path, **options)

    size = size_of(made(base=False))
    small, every = filled(host_memory=size // 2), filled(disk_weights=True)
    assert 0 < len(on_disk(small)) < LAYERS == len(on_disk(every))
    assert equal(small, every)


def test_buckets_that_stay_do_not_go_to_the_disk(tmp_path: Path) -> None:
    """Nor come from there."""
    model = made(base=True)
    given = {"gpu_memory": "1GiB", "resident": 0, "disk": tmp_path, "lowering": "eager"}
    options = abstract_options(device="cpu", host_memory=int(1.85 * size_of(model)), **given)
    x = torch.empty(4, WIDTH, device="meta")
    (program,) = abstract_programs(
        nn.Sequential(model.to("meta"), Loss()), (x,), options=options, hardware=DISK
    )
    stays = Placement(stays="a hook is on a node")
    with pytest.raises(HostMemoryError):
        program.compiler.choose(*program.planned(), stays)
    assert not program.compiler.wants(stays).weights_on_disk
    every = frozenset(bucket.key for bucket in program.stages.buckets)
    there = replace(stays, weights_on_disk=every)
    assert program.compiler.choose(*program.planned(), there).weights_on_disk == every


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_option(tmp_path: Path, asked: bool | None) -> None:
    def may(**options: Any) -> bool:
        return Options.resolve(device="cpu", disk_weights=asked, **options).may_store_weights

    assert may(disk=tmp_path) == (asked is None)
    if not asked:
        assert not may() and not may(disk=tmp_path, compute_dtype=torch.bfloat16)
