"""`explain(model)`, and the critical path of a step; views of a schedule: code, tables, diffs."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from torch import fx, nn

import megacompile as mc
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.memory import device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.buckets import Slot
from megacompile.ir.plan import Plan
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.views import critical_path
from megacompile.views.timeline import Run, Span, Timeline, describe, in_order, predicted_spans
from tests.draws import drawn
from tests.edits import find
from tests.equality.nets import Applies
from tests.planned import EVERYTHING, SPECS, built, planned, rows
from tests.zoo import Stack, Tower, scheduled

WIDTH, TOKENS = 64, 32


def net() -> Tower:
    """Equal layers between two others."""
    equal = [[nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)] for _ in "123"]
    layers = [nn.Linear(8, WIDTH), *(nn.Sequential(*each) for each in equal), nn.Linear(WIDTH, 8)]
    return Tower(layers, lambda of, x: of(x) + x if isinstance(of, nn.Sequential) else of(x))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(TOKENS, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mc.megacompile(net(), device="cpu", progress=False, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def sizes(model: nn.Module) -> tuple[int, int]:
    padded = sum(bucket.size_bytes for bucket in mc.schedules(model)[0].buckets)
    return sum(p.numel() * p.element_size() for p in model.parameters()), padded


@pytest.fixture(autouse=True)
def _no_rates_on_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


BALANCED = H200.replace(launch_s=1e-9, copy_s=0.0, matmul32_tflop_s=1e-1, memory_gb_s=1e3)
SLOW = {
    "compute": BALANCED.replace(matmul32_tflop_s=1e-4, memory_gb_s=1.0),
    "h2d": BALANCED.replace(h2d_gb_s=5e-3, h2d_both_gb_s=5e-3),
    "d2h": BALANCED.replace(d2h_gb_s=5e-3, d2h_both_gb_s=5e-3),
    "host update": BALANCED.replace(update_gb_s=5e-3),
    "host memory bandwidth": BALANCED.replace(host_memory_gb_s=5e-3),
}


def test_a_streamed_model() -> None:
    """Figures, the bound on other machines, and a trace next to the prediction."""
    model, optimizer = trained(lowering="eager")
    found = mc.explain(model)
    (schedule,) = mc.schedules(model)
    size, padded = sizes(model)
    assert size <= padded <= 1.01 * size
    assert found.host.kinds == {
        "parameters": padded,
        "gradients": size,
        "optimizer states": 2 * size,
    }
    assert found.host.needed_bytes == padded + 3 * size
    assert found.device.needed_bytes == sum(found.device.kinds.values())
    streamed = device_memory([schedule], fused=False).peak  # whose updates the host makes
    assert found.device.needed_bytes == streamed.total_bytes
    assert found.device.kinds["slots"] == sum(slot.size_bytes for slot in schedule.slots)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.templates == len(schedule.templates) and "stages" not in found.code
    covered = [i for group in found.stages for i in range(group.first, group.last + 1)]
    assert covered == [stage.index for stage in schedule.stages]
    assert [group.treatment for group in found.stages][-1] == "kept"
    assert found.stages[1].treatment == "recomputed"
    assert found.stages[1].recompute_s > 0 and found.stages[-1].recompute_s == 0
    assert set(found.reasons) == set(schedule.plan.reasons)
    assert found.hardware.startswith("this CPU (rates of an H200 assumed; python -m megacompile")
    assert f"{schedule!r}".startswith("<schedule 'Tower' for f32[32, 8]: forward, backward, update")

    lines = str(found).splitlines()
    assert 1 < len(lines) <= 50 and max(map(len, lines)) <= 100
    again = json.loads(json.dumps(found.to_dict()))
    assert again["device"]["needed_bytes"] == found.device.needed_bytes
    assert again["bound"] == found.bound and again["device"]["fits"] is True
    assert found._repr_html_().startswith("<pre>")

    for resource, machine in SLOW.items():
        other = mc.explain(model, hardware=machine, changes=False)
        assert other.bound == resource and other.bounds[resource] > 0.8
    slow = H200.replace(h2d_gb_s=1e-3, h2d_both_gb_s=1e-3)
    fast = mc.explain(model, hardware=slow, changes=False)
    short = mc.explain(model, hardware=slow.replace(locked_bytes=0), changes=False)
    assert short.step_s > 1.5 * fast.step_s and short.to_dict()["page_locked"]["fits"] is False

    assert found.traced_step_s is None and found.traced_bound is None
    with mc.trace(model) as trace:
        for _ in range(2):
            step(model, optimizer)
    found = mc.explain(model, changes=False)
    busy = {row.stream: row.traced_s for row in found.streams}
    assert found.traced_bound == next(iter(found.traced_waits)) in busy
    assert found.traced_step_s is not None
    shares = sum(found.traced_waits.values()) + (found.traced_none_s or 0.0) / found.traced_step_s
    assert shares == pytest.approx(1.0)
    assert mc.explain(model, trace=trace, changes=False) == found
    del trace
    assert mc.explain(model, changes=False).traced_step_s is None
    assert mc.schedules(model)[0] is schedule, "other plans leave the model as it is"
    model = mc.megacompile(net(), device="cpu", progress=False)
    with torch.no_grad():
        model(torch.randn(TOKENS, 8))
    found = mc.explain(model)
    assert {group.treatment for group in found.stages} == {"forward only"}
    assert "gradients" not in found.host.kinds


def test_resident_buckets_are_on_the_device_by_kind() -> None:
    model, optimizer = trained(resident="all")
    step(model, optimizer)
    found, (size, padded) = mc.explain(model, changes=False), sizes(model)
    assert found.device.kinds["parameters"] == padded
    assert found.device.kinds["optimizer states"] == 2 * size
    assert found.device.kinds["gradients"] > 0, "those that there are at the peak"
    assert sum(found.device.kinds.values()) == found.device.needed_bytes
    assert found.host.kinds == {}
    assert all("resident" in group.treatment for group in found.stages if group.parameter_bytes)


def test_parameters_that_no_captured_code_reads_are_counted() -> None:
    def broken(model: Any, x: torch.Tensor) -> Any:
        return torch.compiler.disable(model.last)(model.first(x).relu())

    layers = {"first": nn.Linear(8, 8), "last": nn.Linear(8, 12)}
    model = mc.megacompile(Applies(broken, **layers), device="cpu", progress=False)
    model(torch.randn(3, 8)).square().mean().backward()
    *_, last = mc.explain(model, changes=False).reasons
    assert last.startswith("108 of 180 parameters are read by no captured code")
    assert not any("no captured" in reason for reason in mc.explain(trained()[0]).reasons)


def test_changes_are_tried() -> None:
    model, _ = trained(gpu_memory="1600KiB")
    found = mc.explain(model, hardware=H200.replace(launch_s=1e-9))
    by_name = {change.name: change for change in found.changes}
    small, now = by_name["8-bit optimizer states"], found.host.needed_bytes
    assert small.host_bytes is not None and small.host_bytes < now
    assert (by_name["twice the device memory"].gain or 0) > 0, "nothing is streamed"
    gains = [change.gain for change in found.changes if change.gain is not None]
    assert gains == sorted(gains, reverse=True)
    large = trained(gpu_memory="64MiB")[0]  # everything is resident
    for each in (found, mc.explain(large, hardware=H200.replace(launch_s=1e-9))):
        listed, _, others = str(each).partition("what would help\n")[2].partition("  - no help: ")
        names = {line[2:].partition("   ")[0] for line in listed.splitlines()[1:]}
        better = {change.name for change in each.changes if (change.gain or 0) >= 0.01}
        assert names == better and len(names) > 1
        worse = {change.name for change in each.changes} - better
        assert set(" ".join(others.split()).split("; ")) == (worse or {""})
    assert worse, "more memory is of no use to it"
    backward = by_name["update in the backward"]
    assert backward.step_s is not None and backward.gain == pytest.approx(
        found.step_s / backward.step_s - 1
    )


MODEL = "Stack"


@cache
def made(activations: str = "auto") -> Schedule:
    return scheduled(Stack(layers=4), progress=False, lowering="eager", activations=activations)


def predicted_steps(
    schedule: Schedule, hardware: Hardware, optimizer: OptimizerCost | None, steps: int
) -> Timeline:
    """Whole steps as a trace of the simulation would show them."""
    graphs = [name for name in schedule.graphs if name != "update" or optimizer is not None]
    told = simulate(schedule, hardware, optimizer=optimizer, steps=steps)
    runs: list[Run] = []
    spans: list[Span] = []
    for step in range(steps):
        for graph in graphs:
            events = [e for e in told.events if (e.step, e.graph) == (step, graph)]
            infos = describe(schedule, graph)
            spans += predicted_spans(infos, events, MODEL, len(runs))
            runs.append(Run(MODEL, graph, schedule))
    return Timeline(in_order(spans), tuple(runs), hardware.name)


EVEN = Hardware("even", 1.0, 1.0, 0.8, 0.8, 1e-3, 1.0, 0.0, host_memory_gb_s=2, update_gb_s=4)
CASES = {
    "balanced": EVEN,
    "h2d": replace(EVEN, h2d_gb_s=0.02, h2d_both_gb_s=0.02),
    "d2h": replace(EVEN, d2h_gb_s=0.02, d2h_both_gb_s=0.02),
    "compute": replace(EVEN, matmul32_tflop_s=1e-6, memory_gb_s=1e-2),
    "host": replace(EVEN, update_gb_s=0.1),
}


@pytest.mark.parametrize("name", drawn(["balanced", "h2d"], ["d2h", "compute", "host"]))
def test_it_finds_what_the_simulation_knows(name: str) -> None:
    """A trace of the simulated run has the simulation's critical path."""
    schedule = made("offload" if name in ("balanced", "d2h") else "recompute")
    optimizer = None if name == "d2h" else OptimizerCost()
    told = simulate(schedule, CASES[name], optimizer=optimizer, steps=4)
    traced = predicted_steps(schedule, CASES[name], optimizer, 4)
    whole = critical_path.period(traced, MODEL)
    assert whole is not None and whole.steps == 3
    assert whole.step_s == pytest.approx(told.step_s, rel=0.02)
    last = critical_path.Period(whole.stop_s - told.step_s, whole.stop_s, 1)
    found = critical_path.critical_path(traced, MODEL, last)
    for lane in Stream:
        share, known = (
            x / told.step_s for x in (found.get(lane.value, 0.0), told.critical_s[lane])
        )
        assert share == pytest.approx(known, abs=0.03), f"{lane}: {found}, {told.critical_s}"
    assert sum(found.values()) == pytest.approx(last.stop_s - last.start_s)
    if name != "balanced":
        assert next(iter(found)) == name


PRINTED = [spec for spec in SPECS.values() if "offload" not in spec]
PRINTED += [EVERYTHING, {"stages": 12, "slots": 3, "changes": range(12)}]  # with long lines


def function(schedule: Schedule, name: str) -> str:
    return "def " + schedule.code().split("\n\ndef ")[1:][list(schedule.graphs).index(name)]


def steps(graph: fx.Graph) -> list[str]:
    """The ops of a graph in their order, and the names that it frees."""
    found = []
    for node in graph.nodes:
        if ops.op_of(node) is not None and node.target is not ops.free:
            found.append(ops.label(node))
        if node.target in (ops.free, ops.defer_free):
            found.append(node.args[0].name)
    return found


def steps_of_code(code: str) -> list[str]:
    """The same of a function, by its labels and its `del`."""
    said = re.findall(r"\bdel ([\w, ]+)|  # [a-z]\S* +([A-Z0-9]\S*)", code)
    words = [word for names, label in said for word in ([label] if label else names.split(", "))]
    return [word.strip() for word in words if word != "WAIT"]


@pytest.mark.parametrize("spec", PRINTED, ids=str)
def test_the_code_makes_the_calls_of_the_graph(spec: dict[str, Any]) -> None:
    """And drops what it frees, where it does."""
    schedule = built(**spec)
    for name, graph in schedule.graphs.items():
        code = function(schedule, name)
        assert steps_of_code(code) == steps(graph)
        lines = [line.split("  #")[0].rstrip() for line in code.splitlines()]
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("end", ["\n", "\f", "\0", "\u2028", "\udc80", "'\n"])
def test_names_from_outside_stay_within_their_comments(end: str) -> None:
    schedule = built(stages=3)
    name = f"A{end}import os{end}#"
    for stage in schedule.stages:
        object.__setattr__(stage, "name", f"layers.{name}")
    plan = Plan(reasons=(f"stage 2 (layers.{name}) is kept",))
    schedule = replace(schedule, name=name, plan=plan)
    text = schedule.code()
    assert [type(part) for part in ast.parse(text).body] == [ast.FunctionDef] * 3
    head = text[: text.index("\ndef ")].splitlines()
    assert all(line.startswith("#") for line in head if line)
    for shown in (text, schedule.table(), schedule.diff(built())):
        assert all(line.isprintable() for line in shown.split("\n"))


def test_variables_shadow_neither_ops_nor_objects() -> None:
    schedule = built(stages=2, training=False)
    x, begin = schedule.forward.find_nodes(op="placeholder")[0], find(schedule, "forward", "BEGIN")
    x.name, begin.name = "stage_0", "wait"
    find(schedule, "forward", "0F").name = "prefetch"
    nodes = [node for node in ast.walk(ast.parse(schedule.code())) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    assert not stored & {"stage_0", "wait", "prefetch"}


def test_what_nobody_takes_is_dropped() -> None:
    schedule = built(stages=2)
    backward = schedule.graphs["backward"]
    item, last = (find(schedule, "backward", name) for name in ("d0_0", "s0_1_again"))
    backward.output_node().args = (((None,), (), ()),)
    for dropped in (item, last):
        for free in [user for user in dropped.users if user.target is ops.free]:
            backward.erase_node(free)
    last.replace_all_uses_with(find(schedule, "backward", "s0_0_again"))
    for dropped in (item, last):
        backward.erase_node(dropped)
    code = function(schedule, "backward")
    assert "s0_0_again, _ = recompute(stage_0" in code
    assert re.search(r"_, g0_0 = backward\(stage_0[^#]*#.*\n[^#]*del _ ", code)


def test_a_diff_has_the_lines_of_the_python_that_change() -> None:
    before = built(stages=3, training=False)
    after = before.copy()
    assert before.diff(after) == ""
    find(after, "forward", "2PREFETCH@0").kwargs = {"after": (find(after, "forward", "1F"),)}
    changed = [line for line in before.diff(after).splitlines() if line[:2] in ("- ", "+ ")]
    assert len(changed) >= 2 and "2PREFETCH@0" in changed[0]
    plan = rows(3, {1}, reasons=("there is room",))
    slots = (*before.slots, Slot(2, 128))
    found = before.diff(replace(before, plan=plan, slots=slots))
    assert "+# plan: there is room" in found and "3 slots of 640 B" in found


def edges(graph: nx.MultiDiGraph, kind: str) -> set[tuple[str, str]]:
    """By the labels of the ops."""
    label = nx.get_node_attributes(graph, "label")
    return {(label[a], label[b]) for a, b, data in graph.edges(data=True) if data["kind"] == kind}


def test_tokens_are_edges_around_the_step_and_streams_of_the_update_have_no_order() -> None:
    tokens = edges(planned("0F 1F 2F", inductor=True, device_update=0.4).to_networkx(), "token")
    assert {("0OFFLOAD_STATE", "0PREFETCH@0"), ("2UPDATE", "2PREFETCH@2")} < tokens
    assert {("0OFFLOAD_STATE", "0FETCH_STATE"), ("1OFFLOAD_GRAD", "1UPDATE")} < tokens
    assert len(tokens) == 8
    schedule = built(stages=3, helps=True)
    graph = schedule.to_networkx()
    assert not any(a.startswith("update") for a, b, kind in graph.edges if kind == "stream")
    assert edges(graph, "names") == {(f"{i}UPDATE", "HELP_HOST") for i in range(3)}


def test_nodes_and_edges_of_a_small_forward(tmp_path: Path) -> None:
    graph = built(stages=3, training=False).to_networkx()
    assert edges(graph, "data") >= {("0PREFETCH@0", "0F"), ("0F", "1F"), ("1F", "2F")}
    assert edges(graph, "after") == {
        ("BEGIN", "0PREFETCH@0"),
        ("BEGIN", "1PREFETCH@1"),
        ("0F", "2PREFETCH@0"),
    }
    assert ("0PREFETCH@0", "1PREFETCH@1") in edges(graph, "stream")
    assert edges(graph, "boundary") == set()
    (prefetch,) = [d for _, d in graph.nodes(data=True) if d["label"] == "2PREFETCH@0"]
    of_it = {"op": "prefetch", "graph": "forward", "stream": "h2d", "stage": 2, "slot": 0}
    assert (of_it | {"module": "unit 2", "bytes": 256}).items() <= prefetch.items()
    nx.write_graphml(graph, tmp_path / "schedule.graphml")
    again = nx.read_graphml(tmp_path / "schedule.graphml", force_multigraph=True)
    assert set(again.nodes) == set(graph.nodes)
    assert again.number_of_edges() == graph.number_of_edges()
