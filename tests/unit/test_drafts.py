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

from megacompile.cost.memory import device_memory
from megacompile.cost.places import host_memory
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.plan import Choice, Places
from megacompile.ir.schedule import Schedule
from megacompile.plan.abstract import abstract_options, abstract_programs
from tests.planning import GIB, captured, problem_of, with_drive
from tests.zoo import Tower

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


# Saved tensors on a disk.


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
