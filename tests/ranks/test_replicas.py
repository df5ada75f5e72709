"""What the sum of gradients over replicas costs: ranks of other hosts have the same rows (HSDP)."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megacompile import Explanation
from megacompile.cli import main
from megacompile.cost import ranks
from megacompile.cost.hardware import ASSUMED_NETWORK_GB_S, H200, Hardware
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.queues import COMM, H2D, Queues, Work
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.mesh_options import PlannedMesh
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.plan.scenario import Scenario
from tests.configs import CONFIG
from tests.processes import group_of_one

TOKENS = 2048
RANKS = 4


class Tower(nn.Module):
    """Layers that are large enough for memory to matter, on meta."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(6)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def program(replicas: int, **options: Any) -> Any:
    """A tower whose layers live on the devices of hosts with four H200 each."""
    model = Tower().to("meta", torch.bfloat16)
    given = abstract_options(device="cpu", resident="all")
    given = replace(given, mesh=PlannedMesh(RANKS, replicas), **options)
    inputs = (torch.empty(TOKENS, 4096, device="meta", dtype=torch.bfloat16),)
    (found,) = abstract_programs(model, inputs, options=given, hardware=H200)
    return found


@functools.cache
def captured(replicas: int) -> Schedule:
    schedule: Schedule = program(replicas).schedule()
    return schedule


@functools.cache
def micro_batch(replicas: int, *, last: bool) -> Schedule:
    """One that adds to what is there."""
    found = program(replicas, device_update=0.0)
    planned = found.planned(accumulate=True)
    variant = replace(planned.variant, defers=not last)
    schedule: Schedule = found.plans.schedule(planned.stages, planned.capture, variant)
    return schedule


def planned(replicas: int, gb_s: float | None = None, start_s: float = 0.0) -> Scenario:
    hardware = H200.shared_by(RANKS)
    hardware = replace(hardware, network_gb_s=gb_s, collective_s=start_s)
    return Scenario((captured(replicas),), hardware, OptimizerCost())


def busy_s(scenario: Scenario) -> float:
    return scenario.timeline().busy_s(Stream.COMM)


def gradient_bytes(scenario: Scenario) -> int:
    """Of a rank's part."""
    (schedule,) = scenario.schedules
    return sum(param.size_bytes for b in schedule.buckets for param in b.params) // RANKS


@pytest.mark.parametrize(("replicas", "times"), [(2, 1.0), (4, 1.5)])
def test_each_rank_sums_its_part_with_those_that_have_it_too(replicas: int, times: float) -> None:
    alone, several = planned(1), planned(replicas, 5.0)
    more_s = busy_s(several) - busy_s(alone)
    assert more_s == pytest.approx(times * gradient_bytes(alone) / 5e9, rel=0.02)
    assert several.step_s > 1.1 * alone.step_s and several.step_s > busy_s(several)


@pytest.mark.thorough
def test_a_micro_batch_that_another_one_follows_takes_no_such_sum() -> None:
    hardware = replace(H200.shared_by(RANKS), network_gb_s=5.0)
    nobody: Any = None  # updates

    def scenario(replicas: int, *, last: bool) -> Scenario:
        return Scenario((micro_batch(replicas, last=last),), hardware, nobody)

    first, last, alone = scenario(2, last=False), scenario(2, last=True), scenario(1, last=True)
    assert busy_s(first) == pytest.approx(busy_s(alone), rel=0.01)
    assert first.step_s == pytest.approx(alone.step_s, rel=0.01)
    assert busy_s(last) == pytest.approx(busy_s(planned(2, 5.0)), rel=0.01)
    assert busy_s(last) < last.step_s < 1.25 * busy_s(last), "hidden, or hiding all else"


def test_each_of_these_sums_takes_time_to_start() -> None:
    (schedule,) = planned(1).schedules
    without = busy_s(planned(2, 5.0)) - busy_s(planned(1))
    with_start = busy_s(planned(2, 5.0, 1e-3)) - busy_s(planned(1, None, 1e-3))
    assert with_start - without == pytest.approx(1e-3 * len(schedule.buckets), rel=0.02)


def test_a_network_is_among_what_bounds_a_step() -> None:
    bounds = planned(2, 1.0).bounds()
    assert next(iter(bounds)) == "network" and bounds["network"] > 0.5
    assert planned(2, 1000.0).bounds()["network"] < 0.05
    assert "network" not in planned(1).bounds()
    assumed = planned(2)
    assert assumed.step_s == pytest.approx(planned(2, ASSUMED_NETWORK_GB_S).step_s)
    assert assumed.bounds() == pytest.approx(planned(2, ASSUMED_NETWORK_GB_S).bounds())


def test_it_shares_the_link_to_the_host() -> None:
    def h2d_s(network_gb_s: float, *, of_replicas: bool) -> float:
        unit = Hardware("unit", 4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 0.0, network_gb_s=network_gb_s)
        queues = Queues(unit)
        queues.add(Work("backward", "sum", COMM, 9e9, [], 0, of_replicas=of_replicas))
        copy = queues.add(Work("backward", "copy", H2D, 3e9, [], 0))
        queues.go()
        return queues.stop_s[copy]

    assert h2d_s(1.0, of_replicas=False) == 0.75, "an interconnect of its own"
    assert h2d_s(1.0, of_replicas=True) == 1.0
    assert h2d_s(100.0, of_replicas=True) == 0.75, "no faster than the link: it is another one"


def test_one_replica_gets_nothing_from_others() -> None:
    """That two get something: `tests/ranks/explain.py`."""
    sizes: list[Any] = []

    def told(value: Any) -> list[Any]:
        sizes.append(value)
        return [value, (1.0, 3.0)] if value else [value] * 2

    with group_of_one():
        mesh = init_device_mesh("cpu", (1, 1))
        assert ranks.network(mesh, torch.device("cpu"), told, 2**16) == 0.0
    assert len(sizes) == 2 and sizes[0] is None, "nobody waits for one that has no memory"


@pytest.fixture
def config(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.mark.thorough
def test_hosts_are_planned(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", config, "--batch", "2", "--seq", "16", "--gpus", "2", "--hosts", "2"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"] == 2 and found["plan"]["replicas"] == 2
    assert found["plan"]["network_gb_s"] == 12.5 and found["plan"]["network_is_assumed"]
    assert found["tokens_per_s"] == pytest.approx(4 * 32 / found["step_s"])
    assert main([*argv, "--network", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "on each of 2 NVIDIA H200 of each of 2 hosts; memory is" in text
    assert "bound by network\n" in text
    assert "each gradient is summed over 2 replicas, at 0.1 GB/s a rank\n" in text


def test_what_is_assumed_is_said() -> None:
    def text(scenario: Scenario) -> str:
        return f"{Explanation.of(scenario, model='Tower', parameters=1)}\n"

    line = "each gradient is summed over 4 replicas, at 12.5 GB/s a rank"
    assert f"{line}, which is assumed\n" in text(planned(4))
    assert "on each of 4 x 4 ranks' NVIDIA H200" in text(planned(4))
    assert f"{line}\n" in text(planned(4, 12.5))
    assert "replicas" not in text(planned(1))
