"""Drafts predict what the schedules of their choices do; and what a plan lets go on to a disk.

The models are shapes alone (meta), planned for an H200 as the compiler asks for it.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.cost.hardware import H200
from megacompile.cost.memory import device_memory, host_memory
from megacompile.cost.script import Script
from megacompile.cost.simulate import simulate, simulate_script
from megacompile.cost.stored import disk_memory
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.planner import search

GIB = 2**30
CHOICES = (
    Choice(0),
    Choice(4, device_update=0.4),
    Choice(4, halves=True),
    Choice(3, saved_on_host=2, more_slots=2),
    Choice(0, offload=6, rerun=3),
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
        result: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return result


class Decoder(nn.Module):
    def __init__(self, depth: int, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def problem(in_backward: bool, dropout: float) -> Any:
    model = Decoder(6, 1024, dropout).to("meta", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters()) if in_backward else None
    options = abstract_options(device="cpu", state_dtype=torch.float32, optimizer=optimizer)
    inputs = (torch.empty(4, 2048, 1024, device="meta", dtype=torch.bfloat16),)
    (program,) = abstract_programs(model, inputs, options=options, hardware=H200)
    compiler, planned = program.compiler, program.planned()
    schedule = compiler.pipeline.differentiated(*planned)
    return compiler.chooser.problem_of(schedule, planned.variant)


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
    # what ops wait for is the same on every machine
    draft = drafts.of(Choice(2, device_update=0.4))
    script = Script([draft], asked.optimizer, fused=True)
    slow = H200.replace(update_gb_s=9.0, h2d_gb_s=5.0, matmul_tflop_s=99.0, memory_gb_s=500.0)
    for machine in (H200, slow):
        alone = simulate(draft, machine, optimizer=asked.optimizer, steps=3)
        again = simulate_script(script, machine, steps=3)
        assert again.events == alone.events and again.step_s == alone.step_s


# Saved tensors on a disk.


class Deep(nn.Module):
    """Little to train, and large values between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def deep(disk_saved: bool | None = None, activations: str = "offload", **changes: Any) -> Any:
    budgets = {"budget_bytes": 3 * GIB, "disk_budget_bytes": 100 * GIB, **changes}
    return replace(_deep(disk_saved, activations), **budgets)


@functools.cache
def _deep(disk_saved: bool | None, activations: str) -> Any:
    model = Deep().to("meta", torch.bfloat16)
    x = torch.empty(2**18, 512, device="meta", dtype=torch.bfloat16)
    options = replace(
        abstract_options(device="cpu", activations=activations),
        disk="/absent",
        disk_memory=100 * GIB,
        disk_saved=disk_saved,
    )
    rates = ("disk_read_gb_s", "disk_write_gb_s", "disk_read_both_gb_s", "disk_write_both_gb_s")
    hardware = H200.replace(**dict.fromkeys(rates, 3.0))
    (program,) = abstract_programs(model, (x,), options=options, hardware=hardware)
    planned, compiler = program.planned(), program.compiler
    graphs = compiler.pipeline.differentiated(*planned)
    return compiler.chooser.problem_of(graphs, planned.variant)


def states_bytes(of: Any, choice: Choice) -> int:
    """Host memory where all states are on the disk."""
    return int(of.host_bytes(replace(choice, on_disk=frozenset(b.key for b in of.buckets))))


@pytest.mark.parametrize("activations", ["auto", "offload"])
def test_sums_of_a_choice_are_those_of_the_cost_model(activations: str) -> None:
    asked = deep(activations=activations)
    for choice in (Choice(0), Choice(2, offload=12)):
        for count in (0, 7, 20):
            choice = replace(choice, saved_on_disk=count)
            schedule = asked.schedule(choice)
            exact = sum(host_memory(schedule, asked.optimizer).values())
            assert asked.host_bytes(choice) == pytest.approx(exact, abs=8)
            stored = sum(disk_memory([schedule], asked.optimizer).values())
            assert asked.tiers.of_disk(choice) == stored


def test_as_little_goes_to_a_disk_as_it_takes() -> None:
    """All states first, and then as few saved tensors; or none, where not even all would do."""
    plain = deep()
    states, count = states_bytes(plain, Choice(0)), []
    for missing in (0.0, 0.3, 1.0, 2.0, 9.0):
        tight = deep(host_budget_bytes=int(states - missing * GIB))
        choice = tight.settled(Choice(0))
        count.append(choice.saved_on_disk)
        if 0 < missing < 9:
            assert len(choice.on_disk) == len(plain.buckets) and tight.fits_host(choice)
            assert not tight.fits_host(replace(choice, saved_on_disk=choice.saved_on_disk - 1))
    assert count[0] == count[-1] == 0 and 0 < count[1] < count[2] < count[3] < 20
    never = deep(False, host_budget_bytes=int(states - GIB))
    assert not never.settled(Choice(0)).saved_on_disk
    small = deep(host_budget_bytes=states - GIB, disk_budget_bytes=GIB)
    for nothing in (never, small):
        assert not nothing.fits_host(nothing.settled(Choice(0)))
    every = deep(True)
    schedule = every.schedule(Choice(0))
    assert schedule.plan.saved_on_disk == schedule.plan.offload
    exact = sum(host_memory(schedule, every.optimizer).values())
    assert every.host_bytes(Choice(0)) == pytest.approx(exact, abs=8)


def test_a_search_runs_stages_again_rather_than_that() -> None:
    """Which is faster here."""
    plenty = deep(activations="auto", host_budget_bytes=100 * GIB)
    found = search(plenty, resident=False)
    assert found is not None and found.choice.offload and not found.choice.saved_on_disk
    states = states_bytes(plenty, found.choice)
    tight = deep(activations="auto", host_budget_bytes=int(states - 1.45 * GIB))
    less = search(tight, resident=False)
    assert less is not None and tight.fits_exactly(less.choice)
    assert less.choice.rerun and not less.choice.saved_on_disk
