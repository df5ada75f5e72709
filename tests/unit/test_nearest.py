"""A refusal shows the plan that lacks the least memory, and what would make it fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.cost.hardware import H200
from megacompile.passes.schedule.plan import ROWS, reruns
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.fit import why_not
from megacompile.plan.nearest import DEVICE, DISK, HOST, lacking, nearest
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from megacompile.plan.scenario import Scenario

GIB = 2**30


class Tower(nn.Module):
    """Layers of different sizes behind one another, the first by far the largest."""

    def __init__(self, *sizes: int, width: int = 2048) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        blocks = (nn.Sequential(nn.Linear(width, n), nn.Linear(n, width)) for n in sizes)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


OPTIONS: dict[str, dict[str, Any]] = {  # as a refusal names them
    "8-bit optimizer states": {"state_dtype": "int8"},
    "the update in the backward": {"optimizer": True},
    "8-bit states and the update in the backward": {"state_dtype": "int8", "optimizer": True},
}


def captured(model: nn.Module, x: Tensor, **given: Any) -> AbstractProgram:
    options = abstract_options(device="cpu", **given)
    (found,) = abstract_programs(model, (x,), options=options, hardware=H200)
    return found


@cache
def program() -> AbstractProgram:
    """In bfloat16, with many tokens."""
    model = Tower(*[2048, 4096] * 2).to("meta", torch.bfloat16)
    x = torch.empty(4096, 2048, device="meta", dtype=torch.bfloat16)
    return captured(model, x, state_dtype=torch.float32)


@cache
def streamed(name: str = "", *, layers: int = 1, frozen: bool = False) -> AbstractProgram:
    """With options of a refusal; no bucket lives on the device. `frozen`: biases alone train."""
    model = Tower(*[512] * layers, width=256).to("meta")
    for param in model.parameters():
        param.requires_grad_(param.dim() == 1 or not frozen)
    given = {"gpu_memory": GIB, "resident": 0, **OPTIONS.get(name, {})}
    if "optimizer" in given:
        given["optimizer"] = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    return captured(model, torch.empty(64, 256, device="meta"), **given)


def problem() -> Problem:
    made = program()
    planned, compiler = made.planned(), made.compiler
    graphs = compiler.pipeline.differentiated(*planned)
    return compiler.chooser.problem_of(graphs, planned.variant)


def more(tower: Problem, lacks: dict[str, int]) -> Problem:
    """With what is lacking."""
    host, disk = tower.host_budget_bytes, tower.disk_budget_bytes
    return replace(
        tower,
        budget_bytes=tower.budget_bytes + lacks.get(DEVICE, 0),
        host_budget_bytes=None if host is None else host + lacks.get(HOST, 0),
        disk_budget_bytes=None if disk is None else disk + lacks.get(DISK, 0),
    )


def short_host() -> Problem:
    """So small a device that inputs of stages must wait on the host, which has too little."""
    tower = problem()
    waiting = replace(tower, budget_bytes=tower.peak_bytes(Choice(0, offload=tower.stages)))
    sizes = []
    for rerun in (0, *(reruns(waiting.stages, row) for row in ROWS)):
        choice = Choice(0, rerun=rerun)
        few = waiting.fewest_offloaded(choice)
        if few is not None:
            sizes.append(waiting.host_bytes(replace(choice, offload=few)))
    return replace(waiting, host_budget_bytes=min(sizes) - 2**20)


def test_it_is_the_host_that_is_short() -> None:
    """The plan without anything on the host lacks much of the device, and is not what is shown."""
    tower = short_host()
    assert search(tower) is None
    found = nearest(tower)
    lacks = lacking(tower, found)
    assert (found.offload or found.rerun) and [*lacks] == [HOST] and lacks[HOST] <= 2**20
    assert lacking(tower, Choice(0))[DEVICE] > lacks[HOST]
    assert search(more(tower, lacks)) is not None


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
    lacks = lacking(tower, found)
    enough = more(tower, lacks)
    assert not lacking(enough, found)
    if search(tower) is None:
        assert lacks
        assert sum(lacks.values()) <= sum(lacking(tower, tower.tightest()).values())
        assert enough.fits_host(found) and enough.peak_bytes(found) <= enough.budget_bytes


def scenario(made: AbstractProgram, *, accumulate: bool = False) -> Scenario:
    schedule = made.schedule(accumulate=accumulate)
    return Scenario((schedule,), H200, made.compiler.setting.cost(), True, GIB, 2**40)


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
        _, *lines = why_not(replace(now, host_bytes=there))
        fits = [name for name in sizes if needed[name] <= there]
        said = [line for line in lines if any(f"with {name} it" in line for name in sizes)]
        assert len(said) == ([*sizes].index(fits[0]) + 1 if fits else len(sizes))


def test_no_option_is_named_that_is_there_already() -> None:
    in_8_bits, in_backward, both = OPTIONS
    assert [*scenario(streamed(in_8_bits)).host_with_less()] == [in_backward]
    assert [*scenario(streamed(in_backward)).host_with_less()] == [in_8_bits]
    assert not scenario(streamed(both)).host_with_less()


def test_parameters_on_a_disk_are_not_named_where_they_would_not_do() -> None:
    now = scenario(streamed(layers=12, frozen=True))
    kinds = now.host()
    buffers = 7 * max(bucket.size_bytes for bucket in now.schedules[0].buckets)
    there = buffers + 2 * kinds["gradients"] + 2 * kinds["optimizer states"]
    masters = replace(now.optimizer, master_bytes=4.0)  # which do not go to a disk
    every = {"disk_bytes": GIB, "disk_weights": True}
    for changes, named in (
        ({"host_bytes": there}, True),
        ({"host_bytes": buffers // 2}, False),
        ({"host_bytes": kinds["parameters"] + there}, False),  # it fits
        ({"host_bytes": there, "optimizer": masters}, False),
        ({"host_bytes": there, **every}, False),
    ):
        changed: Any = changes
        lines = why_not(replace(now, **changed))
        assert any("disk" in line.partition(":")[0] for line in lines) == named
