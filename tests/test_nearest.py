"""What a refusal shows: the plan that lacks the least memory, and what would make it fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megacompile import DeviceMemoryError, HostMemoryError
from megacompile.cost.hardware import H200
from megacompile.passes.schedule.plan import ROWS, reruns
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.fit import refusal, why_not
from megacompile.plan.nearest import DEVICE, DISK, HOST, lacking, nearest
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from megacompile.plan.scenario import Scenario
from megacompile.plan.settled import SettledPlans
from megacompile.plan.tiling import TILES
from megacompile.text import format_bytes
from tests import test_disk_placement
from tests.test_joint_budgets import GIB, Tower, problem, program


def more(tower: Problem, lacks: dict[str, int]) -> Problem:
    """With what is lacking."""
    host, disk = tower.host_budget_bytes, tower.disk_budget_bytes
    return replace(
        tower,
        budget_bytes=tower.budget_bytes + lacks.get(DEVICE, 0),
        host_budget_bytes=None if host is None else host + lacks.get(HOST, 0),
        disk_budget_bytes=None if disk is None else disk + lacks.get(DISK, 0),
    )


def short_host(tower: Problem) -> Problem:
    """So small a device that inputs of stages must wait on the host, which has too little."""
    waiting = replace(tower, budget_bytes=tower.peak_bytes(Choice(0, offload=tower.stages)))
    sizes = []
    for rerun in (0, *(reruns(waiting.stages, row) for row in ROWS)):
        choice = Choice(0, rerun=rerun)
        few = waiting.fewest_offloaded(choice)
        assert few is not None
        sizes.append(waiting.host_bytes(replace(choice, offload=few)))
    return replace(waiting, host_budget_bytes=min(sizes) - 2**20)


def test_it_is_the_host_that_is_short() -> None:
    """The plan without anything on the host lacks much of the device, and is not what is shown."""
    tower = short_host(problem())
    assert search(tower) is None
    found = nearest(tower)
    lacks = lacking(tower, found)
    assert (found.offload or found.rerun) and [*lacks] == [HOST] and lacks[HOST] <= 2**20
    assert lacking(tower, Choice(0))[DEVICE] > lacks[HOST]
    assert search(more(tower, lacks)) is not None


@pytest.mark.parametrize("device", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("host", [0.02, 0.3, 0.6, None])
@pytest.mark.parametrize("disk", [None, 0.1])
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
    lacks = lacking(tower, found)
    enough = more(tower, lacks)
    assert not lacking(enough, found)
    if search(tower) is None:
        assert lacks
        assert sum(lacks.values()) <= sum(lacking(tower, tower.tightest()).values())
        assert enough.fits_host(found) and enough.peak_bytes(found) <= enough.budget_bytes


def refused(tower: Problem) -> tuple[Exception, str]:
    made = program()
    assert tower.host_budget_bytes is not None
    hardware = H200.replace(host_bytes=tower.host_budget_bytes)
    other = made.compiler.other(
        made.compiler.setting.options, hardware=hardware, budget_bytes=tower.budget_bytes
    )
    with pytest.raises((HostMemoryError, DeviceMemoryError)) as raised:
        SettledPlans(other).schedule(*made.planned())
    return raised.value, str(raised.value)


def test_the_error_of_the_host_has_what_is_needed_of_each_memory() -> None:
    tower = short_host(problem())
    error, text = refused(tower)
    assert isinstance(error, HostMemoryError)
    tower = tower.in_tiles(TILES[-1])  # which need less
    needed = format_bytes(tower.peak_bytes(nearest(tower)))
    (row,) = [line for line in text.splitlines() if line.startswith("  on the device ")]
    assert row.endswith(needed)
    missing = format_bytes(lacking(tower, nearest(tower))[HOST])
    assert text.splitlines()[-1] == f"with {missing} more of host memory it would fit"


def test_the_error_of_the_device_says_how_much_more_would_do() -> None:
    tower = replace(problem(), budget_bytes=GIB // 64, host_budget_bytes=100 * GIB)
    error, text = refused(tower)
    assert isinstance(error, DeviceMemoryError)
    tower = tower.in_tiles(TILES[-1])  # which need less
    found = nearest(tower)
    missing = lacking(tower, found)
    assert [*missing] == [DEVICE] and found.offload
    assert f"with {format_bytes(missing[DEVICE])} more of device memory it would fit" in text
    assert f", the inputs of {found.offload} stages on the host" in text
    assert (
        f"(host memory: {format_bytes(tower.host_bytes(found))} needed, 100 GiB available)" in text
    )


def test_a_disk_that_is_too_small_for_parameters() -> None:
    """The host has enough: the disk alone is short."""
    tower = test_disk_placement.problem(disk_weights=True, host_budget_bytes=100 * GIB)
    every = tower.tiers.of_disk(Choice())
    tower = replace(tower, disk_budget_bytes=every // 4, budget_bytes=GIB // 2)
    assert search(tower) is None
    found = nearest(tower)
    lacks = lacking(tower, found)
    assert [*lacks] == [DISK]
    now = Scenario(
        (tower.schedule(found),),
        tower.hardware,
        tower.optimizer,
        device_bytes=tower.budget_bytes,
        host_bytes=tower.host_budget_bytes,
        disk_bytes=tower.disk_budget_bytes,
    )
    first, *_, last = refusal(now, tower.peak_bytes(found)).splitlines()
    assert first.startswith("megacompile(): the disk: ") and first.endswith(" available")
    more_of_it = f"with {format_bytes(lacks[DISK])} more of the disk it would fit"
    assert last == f"{more_of_it} (disk_memory=, or a larger disk)"


OPTIONS: dict[str, dict[str, Any]] = {  # as a refusal names them
    "8-bit optimizer states": {"state_dtype": "int8"},
    "the update in the backward": {"optimizer": True},
    "8-bit states and the update in the backward": {"state_dtype": "int8", "optimizer": True},
}


@cache
def streamed(
    name: str = "", *, layers: int = 1, frozen: bool = False, disk: bool = False
) -> AbstractProgram:
    """With options of a refusal; no bucket lives on the device.

    Args:
        frozen: biases alone are trained.
        disk: there is one.
    """
    model = Tower(*[512] * layers, width=256).to("meta")
    for param in model.parameters():
        param.requires_grad_(param.dim() == 1 or not frozen)
    given = {"gpu_memory": GIB, "resident": 0, **OPTIONS.get(name, {})}
    if "optimizer" in given:
        given["optimizer"] = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    x = torch.empty(64, 256, device="meta")
    options = abstract_options(device="cpu", **given)
    if disk:
        options = replace(options, disk="/absent", disk_memory=GIB)
    (found,) = abstract_programs(model, (x,), options=options, hardware=test_disk_placement.DISK)
    return found


def scenario(made: AbstractProgram, *, accumulate: bool = False, host: int = 2**40) -> Scenario:
    schedule = made.schedule(accumulate=accumulate)
    return Scenario((schedule,), H200, made.compiler.setting.cost(), True, GIB, host)


@pytest.mark.parametrize("accumulate", [False, True])
def test_options_of_the_optimizer_need_what_is_said(accumulate: bool) -> None:
    """Against plans with these options; where gradients of micro-batches wait too."""
    now = scenario(streamed(), accumulate=accumulate)
    made = {name: scenario(streamed(name), accumulate=accumulate) for name in OPTIONS}
    needed = {name: sum(made[name].host().values()) for name in OPTIONS}
    if accumulate:  # they wait in the backward too: that alone saves nothing
        assert needed.pop("the update in the backward") == sum(now.host().values())
    sizes = now.host_with_less()
    assert sizes == {name: pytest.approx(size, rel=0.01) for name, size in needed.items()}
    for there in (size * share // 100 for size in needed.values() for share in (98, 102)):
        said = []
        for name, size in sizes.items():
            fits = needed[name] <= there
            which = "would fit" if fits else "would not fit either"
            said.append(f"with {name} it {which}: {format_bytes(size)}")
            if fits:
                break
        _, *lines = why_not(replace(now, host_bytes=there))
        assert lines[: len(said)] == said
        assert not any("fit: " in line or "either: " in line for line in lines[len(said) + 1 :])


def test_no_option_is_named_that_is_there_already() -> None:
    in_8_bits, in_backward, both = OPTIONS
    assert [*scenario(streamed(in_8_bits)).host_with_less()] == [in_backward]
    assert [*scenario(streamed(in_backward)).host_with_less()] == [in_8_bits]
    assert not scenario(streamed(both)).host_with_less()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_on_a_disk_are_named_where_they_would_do(
    frozen: bool, in_backward: bool
) -> None:
    """Against a plan that puts as much there as it takes."""
    name = "the update in the backward" if in_backward else ""
    now = scenario(streamed(name, layers=20, frozen=frozen))
    kinds = now.host()
    there = (kinds["parameters"] + kinds.get("gradients", 0)) * 9 // 10
    other = streamed(name, layers=20, frozen=frozen, disk=True)
    compiler = other.compiler.other(
        other.compiler.setting.options,
        hardware=test_disk_placement.DISK.replace(host_bytes=there),
        budget_bytes=GIB,
    )
    schedule = SettledPlans(compiler).schedule(*other.planned())
    made = replace(now, schedules=(schedule,), host_bytes=there, disk_bytes=GIB)
    assert sum(made.host().values()) <= there
    assert made.disk()["parameters"]
    needed = sum(made.disk().values())

    def says(disk_bytes: int | None, *, may: bool | None = None) -> list[str]:
        changed = replace(now, host_bytes=there, disk_bytes=disk_bytes, disk_weights=may)
        return [line for line in why_not(changed) if "disk" in line.partition(":")[0]]

    size, missing = format_bytes(needed), format_bytes(needed // 2)
    would = "it would fit"
    assert says(None) == [f"with disk= {would}: {size} there, parameters among it"]
    more = f"with {missing} more of the disk {would} (disk_memory=, or a larger disk)"
    assert says(needed) == []
    assert says(needed - needed // 2) == [more]
    without = "without disk_weights=False"
    assert says(None, may=False) == [
        f"with disk=, {without}, {would}: {size} there, parameters among it"
    ]
    assert says(needed, may=False) == [f"{without} {would}: {size} on the disk"]
    assert says(needed - needed // 2, may=False) == [f"{without} and {more}"]


def test_parameters_on_a_disk_are_not_named_where_they_would_not_do() -> None:
    now = scenario(streamed(layers=20, frozen=True))
    kinds = now.host()
    buffers = 7 * max(bucket.size_bytes for bucket in now.schedules[0].buckets)
    there = buffers + 2 * kinds["gradients"] + 2 * kinds["optimizer states"]

    def says(changed: Scenario) -> bool:
        return any("parameters among it" in line for line in why_not(changed))

    assert says(replace(now, host_bytes=there))
    assert not says(replace(now, host_bytes=buffers // 2))
    assert not says(replace(now, host_bytes=kinds["parameters"] + there))  # it fits
    masters = replace(now.optimizer, master_bytes=4.0)  # which do not go to a disk
    assert not says(replace(now, host_bytes=there, optimizer=masters))
    every = replace(now, host_bytes=there, disk_bytes=GIB, disk_weights=True)
    assert not any("disk" in line.partition(":")[0] for line in why_not(every))
