"""Schedules of models that are only shapes are those of the model in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import ModelError, OptionError, megacompile, schedules
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from tests import inside

IDS = torch.zeros(2, 8, dtype=torch.int64)


class Mixed(nn.Module):
    """A buffer, a frozen parameter, an integer input, two outputs; tied, or with a break."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 64, bias=False)
        if not breaks:
            self.head.weight = self.embed.weight
        self.layers[1].bias.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((16,), 2.0))
        self.breaks = breaks

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        if self.breaks:
            torch._dynamo.graph_break()
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def actions(found: list[Schedule]) -> list[str]:
    return [ops.actions(graph) for schedule in found for graph in schedule.graphs.values()]


@pytest.mark.parametrize("breaks", [False, True])
def test_the_schedule_is_the_one_that_runs(breaks: bool) -> None:
    """In everything but the history."""
    with torch.device("meta"):
        model = Mixed(breaks)
    *others, last = inside.abstract(model, (IDS,), {"labels": IDS})
    found = [*(program.schedule(reuse=False) for program in others), last.schedule()]
    running = megacompile(Mixed(breaks), device="cpu", progress=False)
    for _ in range(1 + breaks):  # which outputs get a gradient is a guess in the first
        running.zero_grad()
        running(IDS, labels=IDS)[0].backward()
    assert actions(schedules(running)) == actions(found) and len(found) == 1 + breaks
    for real, abstract in zip(schedules(running), found, strict=True):
        for name in ("slots", "buckets", "gradient_params", "saved_values"):
            assert getattr(real, name) == getattr(abstract, name)
        for mine, theirs in zip(real.templates, abstract.templates, strict=True):
            for name in ("saved_bytes", "primals", "gradient_metas"):
                assert getattr(mine, name) == getattr(theirs, name)


def test_the_model_is_left_as_it_was() -> None:
    """Also where it raises."""
    model = Mixed()
    before = {name: (id(p), p.clone(), p.grad) for name, p in model.named_parameters()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    inside.abstract(model, (IDS, IDS))
    with pytest.raises(Exception, match="shape|size|dim"):
        inside.abstract(model, (IDS, torch.zeros(3)))
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1]) and p.grad is None
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert model.head.weight is model.embed.weight and type(model.embed.weight.data) is Tensor
    assert torch.isfinite(model(IDS, IDS)[1]).all()


def test_no_memory_is_taken() -> None:
    """A model of 100 TiB. In a capture without gradients there is no backward."""
    wide = nn.Sequential(*(nn.Linear(2**20, 2**20, bias=False, device="meta") for _ in range(24)))
    x = torch.empty(4, 2**20, device="meta")
    (program,) = inside.abstract(wide, (x,))
    schedule = program.schedule()
    assert len(schedule.stages) == 24 and len(schedule.templates) <= 3
    with torch.no_grad():
        (program,) = inside.abstract(wide, (x,))
    assert program.schedule().backward is None


def test_bad_input_is_refused() -> None:
    for given in (3, nn.ReLU()):
        with pytest.raises(ModelError):
            inside.abstract(given, (torch.ones(2),))  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        inside.abstract(Mixed(), (IDS, IDS), lookahead=0)
