"""Where buckets are placed, the memory that plans may use, and drafts.

The first plan that reads a bucket places it, once. Drafts predict what the schedules of their
choices do: their models are shapes alone (meta), planned for an H200 as the compiler asks for it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile.cost.memory import device_memory
from megacompile.cost.places import host_memory
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.plan import Choice, Placement, Places
from megacompile.ir.schedule import Schedule
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.verify.proof import HazardKind, hazards
from tests.planned import GIB, captured, equal_layers, problem_of, with_drive
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
    made.compiler.replan()
    assert made.schedule().plan == schedule.plan and sought(made) is found, "nothing is sought anew"


def test_other_buckets_than_it_wanted_are_planned_for() -> None:
    made = program(gpu_memory=GIB)
    streamed = made.compiler.plan(made.planned(), Placement())
    assert streamed.plan.resident == frozenset(), "a schedule is for the buckets where they are"
    (key, *_) = made.compiler.wants(Placement()).places.resident
    made.compiler.replan()
    schedule = made.compiler.plan(made.planned(), Placement(Places.of({key})))
    assert schedule.plan.resident == {key}
    assert made.compiler.wants(Placement()) == Placement(), "the first decides, and was given up"
    made, placement = program(gpu_memory=GIB), Placement(stays="a hook is on a node")
    schedule = made.compiler.plan(made.planned(), placement)
    assert made.compiler.wants(placement) == placement, "what stays is not asked for"
    assert schedule.plan.resident == frozenset()
    assert any("a hook is on a node" in reason for reason in schedule.plan.reasons)


class Broken(nn.Module):
    """Two captured graphs with different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = x + torch.tanh(layer(x))
        torch._dynamo.graph_break()
        for layer in self.second:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def two_programs(gpu_memory: int, **options: Any) -> list[Any]:
    return captured(Broken(), 64, WIDTH, dtype=torch.float32, gpu_memory=gpu_memory, **options)


@pytest.mark.parametrize(("layers", "left"), [(4.5, 1), (5.5, 3)])
def test_a_later_graph_takes_what_earlier_ones_leave(layers: float, left: int) -> None:
    """Memory is in layers, with gradients and states, next to the memory of streaming."""
    size = WIDTH * (WIDTH + 1) * 4
    budget = int(layers * 4 * size + 3 * size)
    made = two_programs(budget, device_update=0.0)
    schedules = [each.schedule() for each in made]
    assert [len(schedule.plan.resident) for schedule in schedules] == [3, left]
    cost = made[0].compiler.setting.cost()
    assert device_memory(schedules, optimizer=cost).peak.total_bytes <= budget


def test_the_rest_of_a_step_is_an_update_alone() -> None:
    """It updates buckets that no schedule trains; missing and premature ops are hazards."""
    made = program()
    one, other, *_ = made.schedule().buckets

    def rest() -> tuple[Any, fx.Graph]:
        schedule = made.compiler.rest([one, other], Placement(Places.of({other.key})))
        assert ops.actions(schedule.update) == "0UPDATE 0.1UPDATE HELP_HOST"
        assert list(map(ops.label, ops.returned(schedule.update)[0])) == ["0UPDATE", "0.1UPDATE"]
        return schedule, schedule.update

    (hasty, early), (short, missing) = rest(), rest()
    ops.nodes_of(early, ops.update_host)[0].kwargs = {}
    assert HazardKind.RACE in {hazard.kind for hazard in hazards(hasty)}
    missing.output_node().args = (((ops.returned(missing)[0][0],),),)
    missing.erase_node(ops.nodes_of(missing, ops.update_resident)[0])
    assert HazardKind.WRONG_UPDATE in {hazard.kind for hazard in hazards(short)}


def test_less_is_nine_tenths_of_what_was_needed_and_never_less_than_the_smallest_plan() -> None:
    """Stepping down ends at the smallest plan."""
    made = program(8, gpu_memory=GIB)
    budget = made.compiler.chooser.budget
    assert made.compiler.step_down() == "" and budget.size_bytes() == GIB, "nothing was planned"
    peaks, placements = list[int](), list[Any]()
    while True:
        made.compiler.replan()
        schedule = made.schedule()
        cost = made.compiler.setting.cost()
        peaks.append(device_memory([schedule], optimizer=cost).peak.total_bytes)
        placements.append(made.plans.placement.places.resident)
        before = budget.size_bytes()
        more = before - peaks[-1]  # than is planned, for code that is not fused
        assert budget.holds(more, before) and not budget.holds(more + 1, before)
        assert not budget.holds(0, before + 1)
        assert peaks[-1] <= before and len(peaks) < 50
        if not made.compiler.step_down():
            break
        assert budget.size_bytes() >= int(0.9 * peaks[-1])
        assert made.compiler.step_down() == "", "nothing was planned with it yet"
    assert budget.size_bytes() == before and len(peaks) > 3
    assert peaks == sorted(peaks, reverse=True) and placements[-1] < placements[0]


def test_short_stages_of_a_model_that_fits_run_as_one() -> None:
    made = program(width=64, tokens=8)
    schedule = made.schedule()
    (stage,) = schedule.stages
    assert len(stage.buckets) == 4 and schedule.plan.keep == {0}
    assert schedule.plan.resident == {bucket.key for bucket in schedule.buckets}
    assert any("4 short stages run as one" in reason for reason in schedule.plan.reasons)
    assert made.schedule().stages[0].traced is stage.traced, "decided once"
    made.compiler.replan()
    assert len(made.schedule().stages) == 1, "and again where all is chosen anew"
    planned = made.compiler.chooser._planned.values()
    assert [each.problem.stages for each in planned] == [4, 1], "the last one is what runs"


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


class Layer(nn.Module):
    """One that saves a dozen tensors; its dropout draws."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.gate, self.up = (nn.Linear(width, 2 * width) for _ in range(2))
        self.down = nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(mixed.transpose(1, 2).flatten(2), self.dropout)
        hidden = self.norms[1](x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


@functools.cache
def problem(in_backward: bool, dropout: float) -> Any:
    model = nn.Sequential(*(Layer(1024, dropout) for _ in range(6)))
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
    options = replace(
        abstract_options(device="cpu", activations="offload"),
        disk="/absent",
        disk_memory=100 * GIB,
        disk_saved=disk_saved,
    )
    # little to train, and large values between layers
    tower = Tower((nn.Linear(512, 512) for _ in range(20)), lambda layer, x: layer(x).relu())
    model = tower.to("meta", torch.bfloat16)
    x = torch.empty(2**18, 512, device="meta", dtype=torch.bfloat16)
    (made,) = abstract_programs(model, (x,), options=options, hardware=with_drive(3.0))
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
