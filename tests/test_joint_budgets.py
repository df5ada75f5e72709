"""Device and host memory together: what one has no memory for goes to the other, or is refused."""

from __future__ import annotations

import random
import sys
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import (
    DeviceMemoryError,
    HostMemoryError,
    api,
    compat,
    explain,
    host_memory,
    megacompile,
)
from megacompile.beside.memory import processes
from megacompile.cost.hardware import H200
from megacompile.cost.memory import Kind
from megacompile.cost.memory import host_memory as host_bytes_of
from megacompile.host_memory import budget_bytes
from megacompile.options import Lowering, Options
from megacompile.passes.schedule.plan import reruns
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.compiler import PassCompiler
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from megacompile.plan.settled import SettledPlans
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.disk_buffers import DiskBuffer
from megacompile.runtime.model.lookup import streamed_model
from tests.draws import drawn

GIB = 2**30


class Tower(nn.Module):
    """Layers of different sizes behind one another, the first by far the largest."""

    def __init__(self, *sizes: int, width: int = 2048) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Linear(4 * width, width)
        blocks = (nn.Sequential(nn.Linear(width, n), nn.Linear(n, width)) for n in sizes)
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu())
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


@cache
def program(optimizer: bool = False) -> AbstractProgram:
    model = Tower(*([2048, 4096] * 4)).to("meta", torch.bfloat16)
    given: dict[str, Any] = {"state_dtype": torch.float32}
    if optimizer:
        given["optimizer"] = torch.optim.AdamW(model.parameters())
    x = torch.empty(4096, 2048, device="meta", dtype=torch.bfloat16)
    options = abstract_options(device="cpu", **given)
    (found,) = abstract_programs(model, (x,), options=options, hardware=H200)
    return found


def problem(**changes: Any) -> Problem:
    planned = program().planned()
    compiler = program().compiler
    found = compiler.chooser.problem_of(compiler.pipeline.differentiated(*planned), planned.variant)
    return replace(found, budget_bytes=4 * GIB, **changes)


def test_the_sum_is_that_of_the_cost_model() -> None:
    tower = problem()
    for count in (0, 3, len(tower.buckets)):
        for offload in (0, 2, tower.stages):
            choice = replace(tower.with_residents(count), offload=offload)
            kinds = host_bytes_of(tower.schedule(choice), tower.optimizer)
            assert bool(kinds.get(Kind.ACTIVATIONS)) == bool(offload)
            assert tower.host_bytes(choice) == pytest.approx(sum(kinds.values()), abs=8)
    assert replace(tower, elsewhere_bytes=5).host_bytes(Choice()) == tower.host_bytes(Choice()) + 5


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.1, 0.0])
def test_less_host_memory_means_more_residents(share: float) -> None:
    everything = problem().host_bytes(Choice())
    tower = problem(host_budget_bytes=int(share * everything))
    found = search(tower)
    assert found is not None
    assert tower.host_bytes(found.choice) <= share * everything
    assert tower.memory(found.choice).peak.total_bytes <= tower.budget_bytes
    least = tower.fewest_residents()
    assert least is not None and len(found.choice.resident) >= least
    if least:
        assert not tower.fits_host(tower.with_residents(least - 1))


def test_a_budget_that_is_no_limit_changes_nothing() -> None:
    plenty, unknown = (search(problem(host_budget_bytes=n)) for n in (1000 * GIB, None))
    assert plenty is not None and unknown is not None and plenty.choice == unknown.choice


def test_offloaded_activations_are_host_memory_too() -> None:
    """The device is so small that stages' inputs wait on the host."""
    tower = problem()
    floor = tower.floor_bytes()
    tight = replace(tower, budget_bytes=floor)
    found = search(tight, resident=False)
    assert found is not None and found.choice.offload
    exact = tower.host_bytes(found.choice)
    assert search(replace(tight, host_budget_bytes=exact), resident=False) is not None
    few = tight.fewest_offloaded(Choice(0))
    assert few is not None and few <= found.choice.offload
    least = tower.host_bytes(Choice(0, offload=few))
    waits = replace(tight, host_budget_bytes=least)
    enough = search(waits, resident=False)
    assert enough is not None
    assert waits.expected_s(enough.choice) <= waits.expected_s(Choice(0, offload=few))


def test_stages_run_again_where_the_host_has_too_little_for_their_outputs() -> None:
    tower = problem()
    tight = replace(tower, budget_bytes=tower.floor_bytes())
    few = tight.fewest_offloaded(Choice(0))
    assert few is not None
    waiting = Choice(0, offload=few)
    least = tower.host_bytes(waiting)
    found = search(replace(tight, host_budget_bytes=least - 1), resident=False)
    assert found is not None and found.choice.rerun == 1
    assert tower.host_bytes(found.choice) < least
    assert tower.memory(found.choice).peak.total_bytes <= tight.budget_bytes
    most = tower.host_bytes(replace(waiting, rerun=reruns(tower.stages, 1)))
    assert replace(tight, host_budget_bytes=most - 1).fewest_reruns(waiting) is None


def test_longer_rows_run_again_where_every_other_stage_is_too_few() -> None:
    tower = problem()
    tight = replace(tower, budget_bytes=tower.floor_bytes())

    def host_bytes(again: int) -> int:
        fewer = tight.fewest_offloaded(Choice(0, rerun=again))
        assert fewer is not None
        return tower.host_bytes(Choice(0, rerun=again, offload=fewer))

    half = reruns(tower.stages, 1)
    needed = {again: host_bytes(again) for again in range(half, tower.stages)}
    least = min(needed.values())
    assert least < needed[half]
    found = search(replace(tight, host_budget_bytes=least), resident=False)
    assert found is not None and found.choice.rerun > half
    assert tower.memory(found.choice).peak.total_bytes <= tight.budget_bytes
    assert search(replace(tight, host_budget_bytes=least - 1), resident=False) is None


def test_where_every_other_stage_runs_again_fewer_wait() -> None:
    """Their outputs are not on the device, so that others can be there."""
    tower = problem()
    again = Choice(0, rerun=reruns(tower.stages, 1))
    tight = replace(tower, budget_bytes=tower.peak_bytes(again))
    few, least = tight.fewest_offloaded(Choice(0)), tower.host_bytes(again)
    assert few and tower.host_bytes(replace(again, offload=few)) > least
    found = search(replace(tight, host_budget_bytes=least), resident=False)
    assert found is not None
    assert found.choice.offload == 0 and found.choice.rerun >= reruns(tower.stages, 1)
    assert search(replace(tight, host_budget_bytes=least - 1), resident=False) is None


def test_no_more_inputs_wait_on_the_host_than_must() -> None:
    tower = problem()
    all_here = tower.memory(Choice(0)).peak.total_bytes
    none_here = tower.memory(Choice(0, offload=tower.stages)).peak.total_bytes
    assert none_here < all_here
    between = replace(tower, budget_bytes=(all_here + none_here) // 2)
    few = between.fewest_offloaded(Choice(0))
    assert few is not None and 0 < few < tower.stages
    assert between.memory(Choice(0, offload=few)).peak.total_bytes <= between.budget_bytes
    assert between.memory(Choice(0, offload=few - 1)).peak.total_bytes > between.budget_bytes
    assert replace(tower, budget_bytes=none_here - 1).fewest_offloaded(Choice(0)) is None


def test_what_fits_nowhere_is_refused_with_the_table() -> None:
    planned, compiler = program().planned(), program().compiler
    needed = problem().host_bytes(Choice())
    small = H200.replace(host_bytes=needed // 40)
    other = compiler.other(compiler.setting.options, hardware=small, budget_bytes=GIB)
    with pytest.raises(HostMemoryError) as raised:
        SettledPlans(other).schedule(*planned)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("megacompile(): host memory: ") and lines[0].endswith(" available")
    assert [line.split()[0] for line in lines[1:4]] == ["parameters", "gradients", "optimizer"]
    assert any("buckets live on the device: no more fit there" in line for line in lines)
    assert lines[-1].endswith("more of host memory it would fit")


def test_an_optimizer_that_nobody_knows_yet_may_have_fewer_states() -> None:
    planned, compiler = program().planned(), program().compiler
    tower = problem()
    params = sum(bucket.size_bytes for bucket in tower.buckets)
    options = replace(compiler.setting.options, resident=0, gpu_memory=4 * GIB)
    size = int(2.2 * params)  # SGD fits, AdamW does not
    other = PassCompiler(options, compiler.pipeline.units, host_bytes=size)
    with pytest.warns(UserWarning, match="does not hold 2 optimizer states"):
        SettledPlans(other).schedule(*planned)


@pytest.mark.parametrize("states", [0.5, 1.5])
def test_a_step_without_memory_for_its_states_changes_nothing(states: float) -> None:
    """No plan was made, so nobody has counted them. torch.optim's own first step makes them."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    before = [param.detach().clone() for param in model.parameters()]
    size = sum(param.nbytes for param in before)
    optimizer = torch.optim.AdamW(model.parameters())
    megacompile(model, device="cpu", host_memory=int((2 + states) * size))
    model(torch.ones(2, 64)).sum().backward()
    for _ in range(2):
        with pytest.raises(HostMemoryError, match="host_memory is"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
    model.state_dict()  # nothing is torn


def test_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(host_memory, "in_ram_bytes", lambda: 990 * GIB)
    assert budget_bytes() == 10 * GIB - int(0.04 * 10 * GIB)
    assert budget_bytes(990 * GIB) == 994 * GIB
    assert budget_bytes(beside_bytes=GIB // 100) == budget_bytes(), "the margin holds it"
    assert budget_bytes(beside_bytes=GIB) == 9 * GIB - host_memory.MARGIN_BYTES
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100)
    assert budget_bytes() == budget_bytes(beside_bytes=GIB) == 0


def test_processes_beside_a_model_are_left_their_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a small host, more than the margin: each has a row."""
    monkeypatch.setattr(compat, "compile_threads", lambda: 16)
    monkeypatch.setattr(compat, "has_cpp_compiler", lambda: True)
    options = Options.resolve(device="cpu", lowering="inductor")
    kernels, update = processes(options)
    assert kernels[0].startswith("16 processes") and kernels[1] == GIB
    assert processes(replace(options, state_dtype="int8"))[1][1] == 2 * update[1]
    in_backward = torch.optim.AdamW([torch.nn.Parameter(torch.empty(0))])
    assert processes(replace(options, optimizer=in_backward)) == [kernels]
    assert processes(replace(options, lowering=Lowering.EAGER)) == []
    on_cuda = replace(options, device=torch.device("cuda"))
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10 * GIB)
    with caplog.at_level("INFO", "megacompile.memory"):
        made = api._compiler(torch.nn.Linear(2, 2), on_cuda, None)
    left = 10 * GIB - host_memory.MARGIN_BYTES - kernels[1] - update[1]
    assert made.keywords["host_bytes"] - left in range(64)
    assert "1 GiB for 16 processes that compile kernels; 800 MiB for what" in caplog.text
    monkeypatch.setattr(compat, "compile_threads", lambda: 1)
    monkeypatch.setattr(compat, "has_cpp_compiler", lambda: False)
    assert processes(options) == []


# --- each runs or is refused


class Meter:
    """Counts what host buffers take, and refuses what is over the limit, as a cgroup would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_bytes: int) -> None:
        self.live = self.peak = 0
        self.killed = False
        stock = HostBuffer.__new__
        meter = self

        def made(cls: type[HostBuffer], size_bytes: int, **given: Any) -> HostBuffer:
            buffer = stock(cls, size_bytes, **given)
            if issubclass(cls, DiskBuffer):
                return buffer
            meter.live += size_bytes
            meter.peak = max(meter.peak, meter.live)
            meter.killed |= meter.live > limit_bytes
            weakref.finalize(buffer, meter.gone, size_bytes)
            return buffer

        monkeypatch.setattr(HostBuffer, "__new__", staticmethod(made))

    def gone(self, size_bytes: int) -> None:
        self.live -= size_bytes


@pytest.mark.parametrize("seed", drawn(range(3), range(3, 20)))
@pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O")
def test_each_runs_or_is_refused(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ten models and budgets a seed; three steps of AdamW stay within what was allowed.

    `make thorough` takes all 200; `python -m tests.budgets` draws others, under a limit of memory.
    """
    rng = random.Random(seed)
    ran = 0
    for _ in range(10):
        sizes = [rng.choice((16, 32, 64)) for _ in range(rng.randint(1, 5))]
        model = Tower(*sizes, width=16)
        params = sum(p.nbytes for p in model.parameters())
        host = int(params * rng.uniform(0.5, 5.0)) + 4096
        device = int(params * rng.uniform(0.5, 6.0)) + 8192
        stored = int(params * rng.uniform(0.1, 4.0)) + 8192
        given: dict[str, Any] = {}
        if sys.platform == "linux" and rng.random() < 0.5:
            given = {"disk": tmp_path, "disk_memory": stored}
        in_backward = rng.random() < 0.5
        with monkeypatch.context() as patch:
            meter = Meter(patch, host)
            try:
                optimizer = torch.optim.AdamW(model.parameters())
                if in_backward:
                    given["optimizer"] = optimizer
                megacompile(model, device="cpu", gpu_memory=device, host_memory=host, **given)
                for _ in range(3):
                    model(torch.ones(4, 16)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except (HostMemoryError, DeviceMemoryError):
                continue
            ran += 1
            assert not meter.killed, (sizes, host, device, meter.peak)
            found = explain(model, changes=False)
            assert found.host.needed_bytes <= host
            disk = streamed_model(model, "test").machine.disk
            assert disk is None or disk.file.used_bytes <= stored
            assert found.disk is None or found.disk.needed_bytes <= stored
    assert ran
