"""Gathers or whole copies: which of them ranks pick, all the same."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.cost.hardware import Hardware
from megacompile.cost.sheets import of_sheet
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.mesh_options import PlannedMesh
from megacompile.plan import copying
from megacompile.plan.abstract import abstract_options, abstract_programs

GIB = 2**30
TOKENS = 2048


class Tower(nn.Module):
    """Layers that are large enough for memory to matter, on meta."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(depth)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@functools.cache
def planned(gb_s: float, whole_buckets: bool | None = None, ranks: int = 4) -> Schedule:
    """A tower on some RTX 4090 of one host, whose gathers bring each so many GB/s."""
    made = of_sheet("4090")
    assert made is not None
    hardware: Hardware = made.shared_by(ranks).with_interconnect(gb_s)
    model = Tower(depth=16).to("meta", torch.bfloat16)
    options = abstract_options(
        device="cpu", state_dtype=torch.float32, resident=0, gpu_memory=4 * GIB
    )
    options = replace(options, mesh=PlannedMesh(ranks), whole_buckets=whole_buckets)
    inputs = (torch.empty(TOKENS, 4096, device="meta", dtype=torch.bfloat16),)
    (program,) = abstract_programs(model, inputs, options=options, hardware=hardware)
    return program.schedule()


def why(schedule: Schedule) -> str:
    (reason,) = (
        r for r in schedule.plan.reasons if "are copied whole" in r or "are gathered:" in r
    )
    return reason


@pytest.mark.thorough
def test_whole_copies_where_gathers_share_the_link() -> None:
    schedule = planned(6.0)
    assert len(schedule.plan.whole) == len(schedule.buckets) == 16
    assert not ops.nodes_of(schedule.forward, ops.all_gather)
    assert len(ops.nodes_of(schedule.forward, ops.prefetch_whole)) == 16
    assert why(schedule).startswith("streamed buckets are copied whole: a step takes ")


@pytest.mark.thorough
def test_gathers_over_an_interconnect() -> None:
    schedule = planned(200.0)
    assert not schedule.plan.whole and ops.nodes_of(schedule.forward, ops.all_gather)
    assert why(schedule).startswith("buckets are gathered: a step takes ")


@pytest.mark.parametrize(("wanted", "gb_s"), [(True, 200.0), (False, 6.0)])
def test_what_is_asked_for_is_done(wanted: bool, gb_s: float) -> None:
    schedule = planned(gb_s, wanted)
    assert bool(schedule.plan.whole) == wanted
    assert bool(ops.nodes_of(schedule.forward, ops.prefetch_whole)) == wanted


class Known:
    """A problem whose steps take a known time."""

    def __init__(self, gathered_s: float, copied_s: float, resident: frozenset[int]) -> None:
        self.times = gathered_s, copied_s
        self.buckets = [SimpleNamespace(key=key) for key in range(4)]
        self.resident = resident

    def copying(self, keys: frozenset[int]) -> Known:
        assert keys == {0, 1, 2, 3}
        return Known(self.times[1], self.times[1], self.resident)

    def step_s(self, choice: Any) -> float:
        return self.times[0]

    def found(self) -> Any:
        return SimpleNamespace(choice=SimpleNamespace(resident=self.resident))


def picked(*ranks: tuple[float, float, set[int]], wanted: bool = False) -> set[frozenset[int]]:
    """What each of some ranks picks: seconds with gathers, with whole copies, and residents."""
    problems = [Known(a, b, frozenset(here)) for a, b, here in ranks]
    said: list[Any] = []

    def pick(known: Any, meet: Any) -> copying.Picked:
        def seek(problem: Any) -> Any:
            return problem.found()

        return copying.pick(known, known.found(), seek, meet, wanted=wanted)

    class Said(Exception):
        pass

    def say(mine: Any) -> list[Any]:
        said.append(mine)
        raise Said

    for known in problems:
        with pytest.raises(Said):
            pick(known, say)
    return {pick(known, lambda mine: said).whole for known in problems}


def test_all_ranks_pick_the_same() -> None:
    every = frozenset(range(4))
    assert picked((2.0, 1.0, set()), (2.0, 1.0, set())) == {every}
    assert picked((2.0, 1.0, set()), (2.0, 2.5, set())) == {frozenset()}, "the slowest counts"
    assert picked((2.0, 1.9, {0}), (1.0, 1.5, {1})) == {frozenset({2, 3})}
    assert picked((2.0, 1.999, set()), (2.0, 1.999, set())) == {frozenset()}, "it hardly pays"
    assert picked((2.0, 3.0, set()), (2.0, 3.0, {3}), wanted=True) == {frozenset({0, 1, 2})}
    assert picked((2.0, 1.0, {0, 1}), (2.0, 1.0, {2, 3})) == {frozenset()}
