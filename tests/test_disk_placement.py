"""Which states lie on a disk: as few as it takes, where every budget holds, or it is refused."""

from __future__ import annotations

import itertools
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megacompile import HostMemoryError, accumulate, explain, megacompile, schedules
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.memory import host_memory
from megacompile.cost.stored import disk_memory
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from megacompile.plan.settled import SettledPlans
from megacompile.plan.tries import Tries
from megacompile.runtime.model.lookup import streamed_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

GIB = 2**30
DEVICE = 856 * 2**20  # enough for every bucket streamed, and for none to live there


def with_drive(each: float, both: float | None = None) -> Hardware:
    """An H200 and a drive that reads and writes so many GB/s, alone and beside one another."""
    both = each if both is None else both
    return H200.replace(
        disk_read_gb_s=each,
        disk_write_gb_s=each,
        disk_read_both_gb_s=both,
        disk_write_both_gb_s=both,
    )


DISK = with_drive(3.0, both=2.0)


class Tower(nn.Module):
    """Equal layers behind one that is much larger."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 8 * width)
        self.narrow = nn.Linear(8 * width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.wide(x).relu())
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


@cache
def program(
    in_backward: bool, state_dtype: Any = torch.float32, disk_weights: bool = False
) -> AbstractProgram:
    model = Tower(16, 2048).to("meta", torch.bfloat16)
    given: dict[str, Any] = {"state_dtype": state_dtype}
    if in_backward:
        given["optimizer"] = torch.optim.AdamW(model.parameters())
    x = torch.empty(4096, 2048, device="meta", dtype=torch.bfloat16)
    options = abstract_options(device="cpu", **given)
    if disk_weights:
        options = replace(options, disk="/absent", disk_memory=100 * GIB, disk_weights=True)
    (found,) = abstract_programs(model, (x,), options=options, hardware=DISK)
    return found


def problem(
    in_backward: bool = False,
    state_dtype: Any = torch.float32,
    *,
    disk_weights: bool = False,
    **changes: Any,
) -> Problem:
    made = program(in_backward, state_dtype, disk_weights)
    planned, compiler = made.planned(), made.compiler
    graphs = compiler.pipeline.differentiated(*planned)
    found = compiler.chooser.problem_of(graphs, planned.variant)
    given = {"budget_bytes": 2 * GIB, "hardware": DISK, "disk_budget_bytes": 100 * GIB, **changes}
    return replace(found, **given)


MODES = [(False, torch.float32), (True, torch.float32), (False, "int8"), (True, "int8")]


@pytest.mark.parametrize("disk_weights", [False, True])
@pytest.mark.parametrize(("in_backward", "dtype"), MODES)
def test_the_sums_are_those_of_the_cost_model(
    in_backward: bool, dtype: Any, disk_weights: bool
) -> None:
    tower = problem(in_backward, dtype, disk_weights=disk_weights)
    keys = [bucket.key for bucket in tower.buckets]
    for resident, on_disk in ((0, 1), (2, 3), (3, 9), (0, len(keys))):
        choice = Choice(0, frozenset(keys[:resident]), frozenset(keys[len(keys) - on_disk :]))
        schedule = tower.schedule(choice)
        exact = sum(host_memory(schedule, tower.optimizer).values())
        assert tower.host_bytes(choice) == pytest.approx(exact, abs=8)
        assert tower.tiers.of_disk(choice) == sum(disk_memory([schedule], tower.optimizer).values())
        assert len(schedule.plan.on_disk) == on_disk


@pytest.mark.parametrize(("in_backward", "dtype"), MODES)
@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_as_few_as_it_takes(in_backward: bool, dtype: Any, share: float) -> None:
    plenty = problem(in_backward, dtype)
    budget = int(share * plenty.host_bytes(Choice()))
    tower = replace(plenty, host_budget_bytes=budget)
    found = search(tower)
    if found is None:  # masters and gradients alone are too much
        assert not tower.fits_host(tower.tightest())
        return
    choice = found.choice
    assert tower.host_bytes(choice) <= budget
    assert tower.memory(choice).peak.total_bytes <= tower.budget_bytes
    for key in choice.on_disk:
        assert not tower.fits_host(replace(choice, on_disk=choice.on_disk - {key}))


def test_parameters_on_a_disk_need_no_host_memory_but_for_buffers() -> None:
    here, there = problem(), problem(disk_weights=True)
    every = replace(Choice(), on_disk=frozenset(bucket.key for bucket in here.buckets))
    parameters = sum(bucket.size_bytes for bucket in here.buckets)
    buffers = 7 * max(bucket.size_bytes for bucket in here.buckets)
    assert here.host_bytes(every) - there.host_bytes(every) == parameters - buffers
    assert there.tiers.of_disk(every) - here.tiers.of_disk(every) == parameters
    small = replace(there, disk_budget_bytes=parameters // 2)
    assert not small.fits_host(Choice()), "the disk is a budget of theirs too"


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_disk_that_is_not_needed_changes_nothing(in_backward: bool) -> None:
    tower = problem(in_backward, host_budget_bytes=1000 * GIB)
    found, without = search(tower), search(replace(tower, disk_budget_bytes=None))
    assert found is not None and without is not None
    assert found.choice == without.choice and not found.choice.on_disk


def test_where_host_memory_is_not_known_all_lie_there_that_the_disk_holds() -> None:
    tower = problem()
    streamed = tower.settled(Choice())
    assert streamed.on_disk == {bucket.key for bucket in tower.buckets}
    needed = tower.tiers.of_disk(streamed)
    small = replace(tower, disk_budget_bytes=needed // 2)
    assert 0 < small.tiers.of_disk(small.settled(Choice())) <= needed // 2


@pytest.mark.parametrize("in_backward", [False, True])
def test_which(in_backward: bool) -> None:
    """The first bucket is the largest: it goes last. See `plan/tiers.py` for the others."""
    tower = problem(in_backward)
    order = [bucket.key for bucket in tower.buckets]
    size = tower.host_bytes(Choice())
    for budget in range(size, size // 2, -size // 40):
        small = replace(tower, host_budget_bytes=budget)
        choice = small.settled(Choice())
        places = sorted(order.index(key) for key in choice.on_disk)
        if len(places) < 2 or 0 in places or 1 in places:
            continue
        gaps = {b - a for a, b in zip(places, places[1:], strict=False)}
        if in_backward:
            assert max(gaps) - min(gaps) <= 1
        else:
            assert gaps == {1} and places[-1] == len(order) - 1


def test_it_is_faster_than_side_by_side() -> None:
    tower = problem(True, hardware=with_drive(40.0, both=30.0))
    order = [bucket.key for bucket in tower.buckets][2:]
    small = replace(tower, host_budget_bytes=int(0.93 * tower.host_bytes(Choice())))
    picked = small.settled(Choice())
    count = len(picked.on_disk)
    assert 1 < count < 12 and picked.on_disk <= set(order)
    for worse in (order[:count], order[len(order) - count :]):
        other = replace(picked, on_disk=frozenset(worse))
        assert tower.step_s(picked) < 0.98 * tower.step_s(other)


def test_residents_leave_the_drive_work_all_through_a_backward() -> None:
    tower = problem(True, hardware=with_drive(10.0))
    host_bytes = tower.host_bytes(Choice(0, tower.with_residents(6).resident))
    tower = replace(tower, host_budget_bytes=int(0.8 * host_bytes))
    order = [bucket.key for bucket in tower.buckets]
    picked = tower.with_residents(6)
    places = sorted(order.index(key) for key in picked.resident)
    assert places[:3] == [0, 1, 2]
    gaps = {b - a for a, b in itertools.pairwise(places[3:])}
    assert len(places) == 6 and min(gaps) > 1 and max(gaps) - min(gaps) <= 1
    first = tower.settled(replace(picked, resident=frozenset(order[:6])))
    assert len(first.on_disk) == len(picked.on_disk) > 1
    assert tower.step_s(picked) < 0.98 * tower.step_s(first)


def test_the_largest_live_on_the_device_before_most_others() -> None:
    """Slots are as large as the largest bucket that is streamed."""
    tower = problem(True)
    last = replace(tower, undecided=[*tower.buckets[2:], *tower.buckets[:2]])
    sizes = {bucket.key: bucket.size_bytes for bucket in tower.buckets}
    four = last.with_residents(4).resident
    assert max(sizes.values()) in {sizes[key] for key in four}
    assert four >= {bucket.key for bucket in last.candidates[:3]}
    assert replace(last, disk_budget_bytes=None).with_residents(4).resident == {
        bucket.key for bucket in last.candidates[:4]
    }


@pytest.mark.parametrize("factor", [1.1, 1.2])
def test_residents_that_need_no_slots_are_more(factor: float) -> None:
    """The estimate of what fits counts slots as if everything were streamed."""
    tower = problem(True, "int8")
    device, host = int(factor * tower.floor_bytes()), int(0.3 * tower.host_bytes(Choice()))
    tight = [replace(tower, budget_bytes=device, host_budget_bytes=host) for _ in range(2)]
    more = search(tight[0])
    with mock.patch.object(Tries, "_add_exactly", lambda self, *_: False):
        fewer = search(tight[1])
    assert more is not None and not tight[0].fits(more.choice)
    assert more.peak_bytes <= device and tight[0].host_bytes(more.choice) <= host
    assert fewer is None or len(more.choice.resident) > len(fewer.choice.resident)
    assert fewer is None or more.step_s < fewer.step_s


@pytest.mark.parametrize("device_gib", [1.6, 1.7, 1.9])
def test_as_many_residents_as_fit_where_the_disk_is_slow(device_gib: float) -> None:
    """No number between one that fits and one that does not is passed over."""
    tower = problem(hardware=with_drive(0.1))
    host_bytes = int(0.5 * tower.host_bytes(Choice()))
    tower = replace(tower, host_budget_bytes=host_bytes, budget_bytes=int(device_gib * GIB))
    found = search(tower, device_update=False)
    assert found is not None
    assert not tower.fits(tower.with_residents(len(found.choice.resident) + 1, keep=0))
    faster = search(tower)  # fewer, where the device updates of what lies on the host pay more
    assert faster is not None
    assert tower.expected_s(faster.choice) <= tower.expected_s(found.choice) * 1.002


def refused(host_bytes: int, disk_bytes: int | None, in_backward: bool = False) -> list[str]:
    made = program(in_backward)
    options = made.compiler.setting.options
    if disk_bytes is not None:
        options = replace(options, disk="/absent", disk_memory=disk_bytes)
    hardware = DISK.replace(host_bytes=host_bytes)
    other = made.compiler.other(options, hardware=hardware, budget_bytes=DEVICE)
    with pytest.raises(HostMemoryError) as raised:
        SettledPlans(other).schedule(*made.planned())
    return str(raised.value).splitlines()


def test_a_disk_that_is_too_small_is_refused_with_the_table() -> None:
    tower = problem(budget_bytes=DEVICE)
    everything = tower.host_bytes(Choice())
    budget = int(0.8 * everything)
    without = refused(budget, None)
    assert "more of host memory it would fit" in without[-1]
    (says,) = [line for line in without if line.startswith("with disk= it would fit: ")]
    assert says.endswith(" GiB there") or says.endswith(" MiB there")
    small = refused(budget, 64 * 2**20)
    assert small[0].startswith("megacompile(): host memory: ")
    assert "of optimizer states on the disk, which holds 64 MiB" in small[0]
    assert any(line.startswith("  on the disk ") for line in small)
    assert any("more of the disk it would fit" in line for line in small)


# --- what runs


def small(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tower(16, 96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    if options.pop("optimizer", False):
        options["optimizer"] = optimizer
    megacompile(model, device="cpu", lowering="eager", **options)
    return model, optimizer


def trained(*, micro: int = 1, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = small(**options)
    for k in range(4):
        optimizer.zero_grad()
        xs = torch.randn(2, 4, 96, generator=torch.Generator().manual_seed(k))
        if micro == 2:
            with accumulate(model) if "optimizer" in options else nullcontext():
                model(xs[0]).backward()
        model(xs[1]).backward()
        optimizer.step()
    return model, optimizer


RUNS: dict[str, dict[str, Any]] = {
    "exact": {},
    "exact, micro-batches": {"micro": 2},
    "in the backward": {"optimizer": True},
    "in the backward, micro-batches": {"optimizer": True, "micro": 2},
    "8 bits": {"state_dtype": "int8"},
    "8 bits, in the backward": {"state_dtype": "int8", "optimizer": True},
}
STATES = {"exact": 2.0, "8 bits": 0.51}


@pytest.mark.parametrize("mode", RUNS)
def test_some_lie_there_and_others_on_the_host(tmp_path: Path, mode: str) -> None:
    given = RUNS[mode]
    params = sum(p.nbytes for p in Tower(16, 96).parameters())
    rest = 1.0 if given.get("optimizer") and "micro" not in given else 2.0
    states = 0.51 if given.get("state_dtype") else 2.0
    host = int(params * (rest + 0.75 * states)) + 8192
    model, optimizer = trained(
        disk=tmp_path, host_memory=host, gpu_memory=int(4.4 * params), resident=0, **given
    )
    expected, its = trained(**given)
    assert all(p.isfinite().all() for p in expected.parameters())
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(optimizer.state.values(), its.state.values(), strict=True):
        for name in one:
            assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name]))
    (schedule,) = {id(s.stages): s for s in schedules(model)}.values()
    machine = streamed_model(model, "test").machine
    there = {key for key, bucket in machine.buckets.items() if bucket.states.on_disk()}
    assert 0 < len(there) < len(machine.buckets) and there == schedule.plan.on_disk
    assert machine.disk is not None
    stored = explain(model).disk
    assert stored is not None and stored.needed_bytes >= machine.disk.file.used_bytes - 4096


def test_a_disk_that_is_full_is_refused_before_anything_runs(tmp_path: Path) -> None:
    params = sum(p.nbytes for p in Tower(16, 96).parameters())
    given = {"host_memory": int(3.5 * params), "gpu_memory": params // 2, "resident": 0}
    model, optimizer = small(disk=tmp_path, disk_memory="64KiB", **given)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(HostMemoryError, match="more of the disk it would fit") as raised:
        model(torch.ones(4, 96))
    assert "of optimizer states on the disk, which holds 64 KiB" in str(raised.value)
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))
    machine = streamed_model(model, "test").machine
    assert machine.disk is not None and machine.disk.file.used_bytes <= 4096
