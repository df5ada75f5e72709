"""Drafts predict what the schedules of their choices do, whatever was drafted before."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.cost.hardware import H200
from megacompile.cost.memory import device_memory, host_memory
from megacompile.cost.ops import computes_s
from megacompile.cost.script import Script
from megacompile.cost.simulate import simulate, simulate_script
from megacompile.ir import ops
from megacompile.ir.nodes import set_args
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.passes.schedule.bundle import bundles_of
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.problem import Problem

CHOICES = (
    Choice(0),
    Choice(5, device_update=0.4),
    Choice(4, halves=True),
    Choice(3, saved_on_host=4),
    Choice(3, saved_on_host=4, more_slots=2),
    Choice(0, offload=6),
    Choice(0, offload=6, rerun=3),
    Choice(2, tiles=4),
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
    """Layers on meta."""

    def __init__(self, depth: int, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, dropout) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def problem(*, in_backward: bool = False, dropout: float = 0.0) -> Problem:
    """A decoder to plan on an H200, as the compiler asks for it."""
    model = Decoder(7, 1024, dropout).to("meta", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters()) if in_backward else None
    options = abstract_options(device="cpu", state_dtype=torch.float32, optimizer=optimizer)
    inputs = (torch.empty(4, 2048, 1024, device="meta", dtype=torch.bfloat16),)
    (program,) = abstract_programs(model, inputs, options=options, hardware=H200)
    compiler, planned = program.compiler, program.planned()
    schedule = compiler.pipeline.differentiated(*planned)
    return compiler.chooser.problem_of(schedule, planned.variant)


def predicted(schedule: Schedule, of: Problem) -> dict[str, object]:
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
        "computes_s": computes_s(schedule, of.hardware),
    }


@pytest.mark.parametrize(("in_backward", "dropout"), [(False, 0.0), (True, 0.1)])
def test_a_draft_predicts_what_the_schedule_of_its_choice_does(
    in_backward: bool, dropout: float
) -> None:
    asked = problem(in_backward=in_backward, dropout=dropout)
    drafts = asked.drafts
    before = ops.actions(drafts.graphs.forward), len(drafts.graphs.forward.nodes)
    for choice in CHOICES:
        drafts.waiting(choice)
        wanted = predicted(drafts.pipeline.planned(drafts.graphs, drafts.variant, choice), asked)
        for _ in range(2):  # the second of what is kept
            made = predicted(drafts.of(choice), asked)
            assert made.keys() == wanted.keys()
            for what, value in wanted.items():
                if what != "computes_s":
                    assert made[what] == value, (choice, what)
            assert made["computes_s"] == pytest.approx(wanted["computes_s"])
    after = ops.actions(drafts.graphs.forward), len(drafts.graphs.forward.nodes)
    assert after == before


def test_a_draft_has_one_value_for_what_a_stage_saves() -> None:
    drafts = problem().drafts
    for choice in (Choice(0), Choice(8)):
        made = drafts.of(choice)
        whole = drafts.pipeline.planned(drafts.graphs, drafts.variant, choice)
        assert made.backward is not None and whole.backward is not None
        assert len(made.backward.nodes) < 0.75 * len(whole.backward.nodes)
        assert not any(stage.bundles for stage in whole.stages)


def test_what_waits_on_the_host_is_in_no_bundle() -> None:
    made = problem().drafts.of(Choice(3, saved_on_host=2))
    away = made.plan.keep & made.plan.offload
    assert len(away) == 2
    for stage in made.stages:
        assert bool(stage.bundles) == (stage.index not in away)


@pytest.mark.parametrize("what", ["an input", "an output"])
def test_a_bundle_is_in_memory_of_its_own(what: str) -> None:
    layer = problem.__wrapped__().drafts.graphs.stages[1].traced
    (bundle,) = (each for each in bundles_of(layer, fused=True) if len(each) > 1)
    graph = layer.graphs[Code.FORWARD_SAVING].graph
    values = list(ops.returned(graph))
    first = len(values) - len(layer.saved)
    other = values[0] if what == "an output" else graph.find_nodes(op="placeholder")[-1]
    values[first + bundle[0]] = other  # which is saved instead
    set_args(graph.output_node(), (tuple(values),))
    layer.graphs[Code.FORWARD_SAVING].meta.clear()  # what was known of the graph
    (rest,) = (each for each in bundles_of(layer, fused=True) if len(each) > 1)
    assert rest == bundle[1:]


def test_what_waits_is_the_same_wherever_buckets_live() -> None:
    drafts = problem().drafts
    resident = frozenset(bucket.key for bucket in drafts.graphs.buckets[:4])
    waiting = drafts.waiting(Choice(3, saved_on_host=2))
    assert waiting and waiting == drafts.waiting(Choice(3, resident, saved_on_host=2))
    assert not drafts.waiting(Choice(3))


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_ops_wait_for_is_the_same_on_every_machine(in_backward: bool) -> None:
    asked = problem(in_backward=in_backward)
    made, cost = asked.drafts.of(Choice(2, device_update=0.4)), asked.optimizer
    script = Script([made], cost, fused=True)
    slow = H200.replace(update_gb_s=9.0, h2d_gb_s=5.0, matmul_tflop_s=99.0, memory_gb_s=500.0)
    for machine in (H200, slow, H200):
        alone = simulate(made, machine, optimizer=cost, steps=3)
        again = simulate_script(script, machine, steps=3)
        assert again.events == alone.events and again.step_s == alone.step_s
