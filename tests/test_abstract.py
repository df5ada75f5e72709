"""Schedules of models that are only shapes: the same as those of the model in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megacompile import megacompile, schedules
from megacompile.cost.memory import host_memory
from megacompile.errors import ModelError, OptionError
from megacompile.ir import ops
from megacompile.ir.capture import ParamInput
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.options import Lowering, Options
from megacompile.plan.abstract import abstract_options, abstract_programs, abstract_schedules
from tests.zoo import hf_gpt2


class Mixed(nn.Module):
    """Tied weights, a buffer, a frozen parameter, an integer input, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].bias.requires_grad_(False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Broken(nn.Module):
    """Two captured graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        total: torch.Tensor = self.second(x).sum()
        return total


def gpt2(device: str) -> nn.Module:
    with torch.device(device):
        model: nn.Module = hf_gpt2(n_embd=32, n_layer=3, attn_implementation="sdpa")
    return model


def eager(**given: Any) -> Options:
    return abstract_options(device="cpu", lowering="eager", **given)


def actions(found: list[Schedule]) -> list[str]:
    return [ops.actions(graph) for schedule in found for graph in schedule.graphs.values()]


def same(real: Schedule, abstract: Schedule) -> None:
    """Everything but the history."""
    assert actions([real]) == actions([abstract])
    assert real.slots == abstract.slots
    assert real.buckets == abstract.buckets
    assert real.gradient_params == abstract.gradient_params
    assert real.saved_values == abstract.saved_values
    for mine, theirs in zip(real.templates, abstract.templates, strict=True):
        assert mine.saved_bytes == theirs.saved_bytes
        assert mine.primals == theirs.primals and mine.gradient_metas == theirs.gradient_metas


def test_the_schedule_is_the_one_that_runs() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with torch.device("meta"):
        model = Mixed()
    (abstract,) = abstract_schedules(model, (ids,), {"labels": ids}, options=eager())

    real = megacompile(Mixed(), device="cpu")
    loss, _ = real(ids, labels=ids)
    loss.backward()
    same(schedules(real)[0], abstract)


def test_a_hugging_face_model_with_labels() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    abstract = abstract_schedules(gpt2("meta"), (), inputs, options=eager())
    real = megacompile(gpt2("cpu"), device="cpu")
    for _ in range(2):  # which outputs get a gradient is a guess in the first
        real.zero_grad()
        real(**inputs).loss.backward()
    assert actions(schedules(real)) == actions(abstract)  # a graph break of its own included


def test_every_device_gives_the_same() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Mixed()
        found.append(abstract_schedules(model, (ids.to(device),), {"labels": ids.to(device)}))
    assert actions(found[0]) == actions(found[1])


def test_defaults_are_those_of_a_gpu() -> None:
    options = abstract_options()
    assert options.lowering is Lowering.INDUCTOR
    ids = torch.zeros(2, 8, dtype=torch.int64)
    (schedule,) = abstract_schedules(Mixed(), (ids, ids))
    assert "NORM_GRAD" in actions([schedule])[1]  # a pass of that lowering
    assert "REUSE" in actions([schedule])[1]
    assert all(not template.code for template in schedule.templates)  # nothing is compiled
    assert [record.name for record in schedule.history][-1] == "tokens"


def test_the_model_is_left_as_it_was() -> None:
    model = Mixed()
    before = {name: (id(p), p.clone(), p.grad) for name, p in model.named_parameters()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    ids = torch.zeros(2, 8, dtype=torch.int64)
    abstract_schedules(model, (ids, ids))
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1]) and p.grad is None
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert model.head.weight is model.embed.weight
    assert torch.isfinite(model(ids)).all()


def test_an_error_in_the_model_leaves_it_as_it_was() -> None:
    model = Mixed()
    first = model.embed.weight
    with pytest.raises(Exception, match="shape|size|dim"):
        abstract_schedules(model, (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(3)))
    assert model.embed.weight is first and type(first.data) is torch.Tensor


def test_no_memory_is_taken() -> None:
    """A model of 100 TiB."""
    wide = nn.Sequential(*(nn.Linear(2**20, 2**20, bias=False, device="meta") for _ in range(24)))
    (schedule,) = abstract_schedules(wide, (torch.empty(4, 2**20, device="meta"),))
    assert sum(host_memory(schedule).values()) == 2 * 24 * 2**40 * 4
    assert len(schedule.stages) == 24 and len(schedule.templates) <= 3


def test_options_reach_the_passes() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model = Mixed()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    given: dict[str, Any] = {"compute_dtype": torch.bfloat16, "lookahead": 1}
    options = abstract_options(optimizer=optimizer, **given)
    (schedule,) = abstract_schedules(model, (ids, ids), options=options)
    assert len(schedule.slots) == 2
    assert {p.dtype for b in schedule.buckets for p in b.params} == {torch.bfloat16}
    assert "UPDATE" in actions([schedule])[1] and "OFFLOAD_GRAD" not in actions([schedule])[1]


def test_one_capture_gives_several_schedules() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    (program,) = abstract_programs(Mixed(), (ids, ids))
    assert sum(isinstance(item, ParamInput) for item in program.capture.inputs) == 9
    adding = program.schedule(accumulate=True, reuse=False)
    assert "FETCH_GRAD" in actions([adding])[1] and "REUSE" not in actions([adding])[1]
    assert adding.templates == program.schedule().templates  # traced once


def test_inference_has_no_backward() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad():
        (schedule,) = abstract_schedules(Mixed(), (ids,))
    assert schedule.backward is None
    assert Code.BACKWARD not in schedule.templates[0].graphs


def test_a_graph_break_gives_two_schedules() -> None:
    found = abstract_schedules(Broken(), (torch.ones(4, 16),))
    assert [schedule.name for schedule in found] == ["Broken", "Broken.1"]
    assert all(schedule.backward is not None for schedule in found)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ModelError, match="got int; needed a torch.nn.Module"):
        abstract_schedules(3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="ReLU has no parameters"):
        abstract_schedules(nn.ReLU(), (torch.ones(2),))
    with pytest.raises(OptionError, match="lookahead=0"):
        abstract_options(lookahead=0)
