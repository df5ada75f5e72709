"""`explain(model)`: its figures against model, schedule and trace; what bounds a step."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import megacompile as mc
from megacompile import compat, inspection
from megacompile.code_counts import CodeCounts
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.memory import Kind, device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.errors import ModelError
from megacompile.plan.scenario import faster
from megacompile.plan.sections import traced_waits_text

WIDTH, TOKENS = 64, 32


class Net(nn.Module):
    """Equal layers between two others."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        result: torch.Tensor = self.last(x).square().mean()
        return result


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(TOKENS, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(**options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model = mc.megacompile(Net(), device="cpu", progress=False, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


@pytest.fixture(autouse=True)
def _no_rates_on_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_in_an_interactive_session_it_is_one_line() -> None:
    """As a schedule is; `print` shows all of both."""
    model, _ = trained()
    explanation = mc.explain(model, changes=False)
    assert repr(explanation).startswith("<explanation of Net: ")
    assert f"a step, bound by {explanation.bound}; print() shows it>" in repr(explanation)
    (schedule,) = mc.schedules(model)
    assert repr(schedule) == (
        "<schedule 'Net': forward, backward, update of 5 stages; print() shows it>"
    )
    assert "\n" in str(schedule) and "\n" in str(explanation)


@pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")
def test_what_came_from_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Of each model's stages; updates and kernels are the process's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    kernels = CodeCounts()
    monkeypatch.setattr(inspection, "UPDATES", CodeCounts())
    monkeypatch.setattr(inspection, "KERNELS", kernels)
    found = []
    for _ in range(2):
        torch.compiler.reset()
        model = mc.megacompile(Net(), device="cpu", progress=False, lowering="inductor")
        model(torch.randn(TOKENS, 8)).backward()
        found.append(mc.explain(model, changes=False))
    first, again = (explanation.code["stages"] for explanation in found)
    assert first.made > 2 and first.time_s > again.time_s > 0
    assert (again.found, again.made) == (first.found + first.made, 0)
    assert found[0].code.keys() == {"stages"}, "there was no step"
    text = str(found[1])
    assert "code, in this process" in text and "compiled beside it" not in text
    kernels.add(found=1, made=2, time_s=3.5)
    dictionary = mc.explain(model, changes=False).to_dict()["code"]
    assert dictionary.keys() == {"stages", "kernels in Triton"}
    assert dictionary["kernels in Triton"] == {"found": 1, "beside": 0, "made": 2, "time_s": 3.5}


def test_operators_as_they_are_need_no_code() -> None:
    model, _ = trained(lowering="eager")
    found = mc.explain(model, changes=False)
    assert "stages" not in found.code


def test_the_figures_are_those_of_the_model_and_its_schedule() -> None:
    model, _ = trained()
    found = mc.explain(model)
    (schedule,) = mc.schedules(model)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    padded = sum(bucket.size_bytes for bucket in schedule.buckets)
    assert size <= padded <= 1.01 * size
    assert found.host.kinds == {
        "parameters": padded,
        "gradients": size,
        "optimizer states": 2 * size,
    }
    assert found.host.needed_bytes == padded + 3 * size
    peak = device_memory(schedule, optimizer=OptimizerCost(), fused=False).peak
    assert found.device.needed_bytes == peak.total_bytes == sum(found.device.kinds.values())
    assert found.device.kinds["slots"] == sum(slot.size_bytes for slot in schedule.slots)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.templates == len(schedule.templates)
    covered = [i for group in found.stages for i in range(group.first, group.last + 1)]
    assert covered == [stage.index for stage in schedule.stages]
    assert [group.treatment for group in found.stages][-1] == "kept"
    assert found.stages[1].treatment == "recomputed"
    assert found.stages[1].recompute_s > 0 and found.stages[-1].recompute_s == 0
    assert set(found.reasons) == set(schedule.plan.reasons)
    assert found.hardware == f"{H200.name} (assumed: not measured here)"


def test_it_prints_on_one_screen_and_goes_to_programs_and_notebooks() -> None:
    model, _ = trained()
    found = mc.explain(model)
    lines = str(found).splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    for words in ("stages", "memory", "the plan", "a step", "its time depends on", "would help"):
        assert words in str(found)
    again = json.loads(json.dumps(found.to_dict()))
    assert again["device"]["needed_bytes"] == found.device.needed_bytes
    assert again["bound"] == found.bound and again["device"]["fits"] is True
    page = found._repr_html_()
    assert page.count("<table>") >= 4 and found.reasons[0].replace("'", "&#x27;") in page


BALANCED = H200.replace(launch_s=1e-9, copy_s=0.0, matmul32_tflop_s=1e-1, memory_gb_s=1e3)
SLOW: dict[str, Hardware] = {
    "compute": faster(BALANCED, "compute", 1e-3),
    "h2d": faster(BALANCED, "h2d", 1e-4),
    "d2h": faster(BALANCED, "d2h", 1e-4),
    "host update": faster(BALANCED, "host update", 1e-4),
    "host memory bandwidth": faster(BALANCED, "host memory bandwidth", 1e-4),
}


@pytest.mark.parametrize("resource", SLOW)
def test_what_is_slow_bounds_the_step(resource: str) -> None:
    model, _ = trained()
    found = mc.explain(model, hardware=SLOW[resource], changes=False)
    assert found.bound == resource
    assert found.bounds[resource] > 0.8
    assert f"bound by {resource}" in str(found)


def test_resident_buckets_are_on_the_device_by_kind() -> None:
    model, optimizer = trained(resident="all")
    step(model, optimizer)
    found = mc.explain(model, changes=False)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    padded = sum(bucket.size_bytes for bucket in mc.schedules(model)[0].buckets)
    assert found.device.kinds[Kind.PARAMETERS.value] == padded
    assert found.device.kinds[Kind.STATES.value] == 2 * size
    assert found.device.kinds[Kind.GRADIENTS.value] > 0, "those that there are at the peak"
    assert sum(found.device.kinds.values()) == found.device.needed_bytes
    assert found.host.kinds == {}
    assert all("resident" in group.treatment for group in found.stages if group.parameter_bytes)


def test_a_trace_stands_beside_the_prediction() -> None:
    model, optimizer = trained()
    nothing = mc.explain(model, changes=False)
    assert nothing.traced_step_s is None and nothing.traced_bound is None
    assert "traced" not in str(nothing)
    with mc.trace(model) as trace:
        for _ in range(2):
            step(model, optimizer)
    found = mc.explain(model, changes=False)
    spans = [s for s in trace.spans if s.op.lane == "compute"]
    ends = [
        max(s.stop_s for s in spans if s.run == i)
        for i, run in enumerate(trace.measured.runs)
        if run.graph == "backward"
    ]
    assert len(ends) == 2 and found.traced_step_s == pytest.approx(ends[1] - ends[0])
    busy = {row.stream: row.traced_s for row in found.streams}
    inside = [s.duration_s for s in spans if ends[0] <= s.start_s < ends[1]]
    assert busy["compute"] == pytest.approx(sum(inside))
    assert found.traced_bound == next(iter(found.traced_waits)) in busy
    assert found.traced_step_s is not None
    shares = sum(found.traced_waits.values()) + (found.traced_none_s or 0.0) / found.traced_step_s
    assert shares == pytest.approx(1.0)
    assert f"critical path of the traced steps\n  - {traced_waits_text(found)}" in str(found)
    assert found.to_dict()["traced_waits"] == found.traced_waits
    assert found.traced_busiest in busy
    assert mc.explain(model, trace=trace, changes=False) == found
    del trace
    assert mc.explain(model, changes=False).traced_step_s is None


def test_changes_are_tried() -> None:
    model, _ = trained(gpu_memory="2MiB", resident=0)
    found = mc.explain(model, hardware=H200.replace(launch_s=1e-9))
    by_name = {change.name: change for change in found.changes}
    assert "twice the batch" in by_name
    small, now = by_name["8-bit optimizer states"], found.host.needed_bytes
    assert small.host_bytes is not None and small.host_bytes < now
    assert by_name["twice the device memory"].gain is not None
    gains = [change.gain for change in found.changes if change.gain is not None]
    assert gains == sorted(gains, reverse=True)
    backward = by_name["update in the backward"]
    assert backward.step_s is not None and backward.gain == pytest.approx(
        found.step_s / backward.step_s - 1
    )
    assert mc.explain(model, changes=False).changes == ()


def test_planning_other_plans_leaves_the_model_as_it_is() -> None:
    model, optimizer = trained(gpu_memory="2MiB")
    step(model, optimizer)  # what is resident has moved by then
    (before,) = mc.schedules(model)
    mc.explain(model)
    step(model, optimizer)
    assert mc.schedules(model)[0] is before


def test_inference_alone_is_explained() -> None:
    model = mc.megacompile(Net(), device="cpu", progress=False)
    with torch.no_grad():
        model(torch.randn(TOKENS, 8))
    found = mc.explain(model)
    assert {group.treatment for group in found.stages} == {"forward only"}
    assert "gradients" not in found.host.kinds
    assert "twice the batch" not in {change.name for change in found.changes}


def test_models_that_have_nothing_to_explain() -> None:
    with pytest.raises(ModelError, match=r"explain\(\): Net is not megacompiled"):
        mc.explain(Net())
    with pytest.raises(ModelError, match=r"explain\(\): Net has not run yet; call it on a batch"):
        mc.explain(mc.megacompile(Net(), device="cpu", progress=False))
