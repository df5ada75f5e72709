"""Traces: every op of a run with its times; what adds up.

What the command line does with them: `tests/models/test_command_line.py`.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from megacompile import Trace, megacompile, schedules, trace
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.simulate import simulate
from megacompile.errors import ModelError, OptimizerError, TraceError
from megacompile.ir import ops, values
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.views.timeline import Timeline
from tests import inside
from tests.stateful.late import late
from tests.zoo import Tower, batchnorm, stack, stacks, step, tied, twins

HOST = "host"  # the lane
QUIET = (ops.free, ops.defer_free, ops.begin)


def tracer_of(model: Any) -> Any:
    return inside.machine(model).tracer


def names(spans: Iterable[Any]) -> list[str]:
    return [span.op.name for span in spans]


def wanted(schedule: Schedule | None, graph: str) -> list[fx.Node]:
    assert schedule is not None
    return [n for n in ops.nodes_of(schedule.graphs[graph]) if n.target not in QUIET]


def check_order(t: Trace, graphs: int, slack_s: float = 0.0) -> None:
    """Every op of the first graphs appears once, and begins after the ops that it waits for."""
    for i, run in enumerate(t.measured.runs[:graphs]):
        nodes, spans = wanted(run.schedule, run.graph), t.measured.of_run(i)
        assert Counter(names(spans)) == Counter(map(ops.label, nodes))
        of = {ops.label(n): n for n in nodes if names(spans).count(ops.label(n)) == 1}
        by_node = {of[span.op.name]: span for span in spans if span.op.name in of}
        for node, span in by_node.items():
            assert span.op.lane == ops.stream_of(node).value
            assert 0.0 <= span.start_s <= span.stop_s
            for source in map(values.producer, node.all_input_nodes):
                if source in by_node:
                    assert by_node[source].stop_s <= span.start_s + slack_s, span


@pytest.mark.gpu
def test_on_a_gpu_the_spans_keep_the_schedules_edges() -> None:
    """What an op waits for is over when it begins, across streams too (by 10 us of resolution)."""
    layers = (nn.Linear(2048, 2048) for _ in range(8))  # copies and computes overlap
    model: Any = Tower(layers, lambda layer, x: torch.relu(layer(x)))
    megacompile(model, lowering="eager", resident=0, activations="recompute")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 2048, device="cuda")
    for _ in range(3):
        with trace(model) as t:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [run.graph for run in t.measured.runs] == ["forward", "backward", "update"]
    check_order(t, 2, 1e-5)  # the update's are all of the host
    updates = [span for span in t.spans if span.op.lane == HOST]
    assert len(updates) == len(schedules(model)[0].buckets)
    device = [span for span in t.spans if span.op.lane != HOST]
    assert min(u.start_s for u in updates) >= max(s.stop_s for s in device) - 1e-3, "one axis"
    peak = max(span.memory_bytes or 0 for span in t.spans)
    assert 0 < peak <= torch.cuda.max_memory_allocated()


TICK_S = 2.0**-20


@pytest.fixture
def ahead_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The host's clock, which advances by a tick when it is read, and by the values put here."""
    ticks, found = itertools.count(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * TICK_S + sum(found))
    return found


@pytest.mark.parametrize("made", [batchnorm, tied], ids=lambda made: made.__name__)
def test_every_op_is_recorded_in_its_order(made: Any) -> None:
    model, inputs = made()
    _, model = twins(model)
    for _ in range(2):  # the second accumulates
        with trace(model) as t:
            step(model, inputs)
        assert [run.graph for run in t.measured.runs] == ["forward", "backward"]
        check_order(t, 2)
    assert any(span.op.kind == "fetch_grad" for span in t.spans)


def test_a_trained_model(ahead_s: list[float]) -> None:
    """Lengths, bytes, updates of the host as a lane, sums, and failures."""
    _, model, inputs = stacks()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, inputs)
    (schedule,) = schedules(model)
    with trace(model) as alone:  # the forward that named the buckets ran before
        optimizer.step()
    updates = [f"{bucket.label}UPDATE" for bucket in schedule.buckets]
    assert names(alone.spans) == updates and "Stack update x1" in alone.table()
    optimizer.zero_grad()
    code = schedule.stages[1].traced.code
    honest = dict(code)

    def slow(given: Any) -> Any:
        ahead_s.append(0.02)
        return honest[Code.FORWARD](given)

    def fail(given: Any) -> Any:
        raise ValueError("in the stage")

    code[Code.FORWARD] = slow
    with trace(model) as t:
        assert not t.spans and "nothing ran" in t.table()
        step(model, inputs)
        half = len(t.spans)
        optimizer.step()
    assert 0 < half < len(t.spans) and "over" in repr(t)
    sizes = {bucket.name: bucket.size_bytes for bucket in schedule.buckets}
    like = {str(s.index) for s in schedule.stages if s.traced.code is code}
    for span in t.spans:
        late = span.op.kind == "forward" and span.op.name[:-1] in like
        if span.op.lane != HOST:
            assert span.duration_s == pytest.approx(TICK_S + 0.02 * late), span
        if span.op.kind == "prefetch":
            assert span.op.size_bytes == sizes[span.op.module]
        elif span.op.kind in ("forward", "recompute", "backward"):
            assert span.op.module == schedule.stages[int(re.sub(r"\D", "", span.op.name))].name
    on_host = [span for span in t.spans if span.op.lane == HOST]
    assert sorted(names(on_host)) == sorted(updates)
    last = max(span.stop_s for span in t.spans if span.op.lane != HOST)
    assert min(span.start_s for span in on_host) >= last, "one time axis"
    check_sums(t)
    for which, kind in ((Code.FORWARD, "forward"), (Code.BACKWARD, "backward")):
        code.update({**honest, which: fail})
        model.zero_grad()
        with pytest.raises(ValueError, match="in the stage"), trace(model) as failed:
            step(model, inputs)
        assert tracer_of(model) is None and failed.spans, "what ran is there"
        assert not like & {s.op.name[:-1] for s in failed.spans if s.op.kind == kind}
    code.update(honest)
    with trace(model) as again:
        step(model, inputs)
    assert [run.graph for run in again.measured.runs] == ["forward", "backward"]


def check_sums(t: Trace) -> None:
    """Totals of kinds and lanes, with overlapping ops."""
    counts = Counter(span.op.kind for span in t.spans)
    rows = {line.split()[0]: line.split() for line in t.table().splitlines() if line}
    assert rows["prefetch"][1:3] == ["h2d", str(counts["prefetch"])]
    for lane in t.measured.lanes:
        busy_s = sum(span.duration_s for span in t.spans if span.op.lane == lane)
        assert t.measured.busy_s(lane) == pytest.approx(busy_s)
        assert float(rows[lane][1]) == pytest.approx(busy_s * 1e3, abs=1e-3)
    one = next(span for span in t.spans if span.op.lane == "compute")
    spans = tuple(replace(one, start_s=at, stop_s=at + 2.0) for at in (0.0, 1.0, 5.0))
    assert replace(t.measured, spans=spans).busy_s("compute") == 5.0


def test_nobody_waits_for_an_update_that_has_failed() -> None:
    _, model, inputs = stacks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, inputs)
    workers = late(model)
    workers.fails = schedules(model)[0].buckets[0].name
    with trace(model) as t:
        optimizer.step()
        workers.finish()
    assert len(t.spans) == len(schedules(model)[0].buckets)
    with pytest.raises(OptimizerError):
        step(model, inputs)


def test_blocks_of_several_traces() -> None:
    """Each trace has its part on its own time axis; outside of traces nothing is recorded."""
    _, model, inputs = stacks()
    first, second = trace(model), trace(model)
    with trace(model) as outer:
        step(model, inputs)
        with trace(model) as inner:
            step(model, inputs)
        first.__enter__()
        step(model, inputs)
        second.__enter__()
        step(model, inputs)
        first.__exit__(None, None, None)
        with torch.no_grad():
            model(**inputs)
        second.__exit__(None, None, None)
    assert tracer_of(model) is None
    step(model, inputs)
    runs = [len(t.measured.runs) for t in (outer, inner, first, second)]
    assert runs == [9, 2, 4, 3]
    assert "Stack forward x5, Stack backward x4" in outer.table()
    assert names(inner.spans) == names([span for span in outer.spans if span.run in (2, 3)])
    shift = outer.measured.of_run(2)[0].start_s - inner.spans[0].start_s
    assert shift > outer.measured.of_run(1)[-1].stop_s, "each begins its own axis"
    with pytest.raises(TraceError), inner:
        pass
    for wrong in ((nn.Linear(2, 2),), ()):
        with pytest.raises(ModelError):
            trace(*wrong)


def test_a_prediction_has_the_ops_that_were_measured() -> None:
    """Of a step of two models."""
    models = [twins(stack()[0])[1] for _ in range(2)]
    with trace(*models, models[0], hardware=H200) as t:
        for model in models:
            step(model, stack()[1])
    measured, predicted = t.measured, t.predicted
    assert predicted is not None
    assert [run.model for run in measured.runs] == ["Stack", "Stack", "Stack 2", "Stack 2"]
    end_s = 0.0
    for i in range(len(measured.runs)):
        here, there = measured.of_run(i), predicted.of_run(i)
        assert Counter(span.op for span in there) == Counter(span.op for span in here)
        assert there[0].start_s == pytest.approx(here[0].start_s)
        assert end_s <= here[0].start_s
        end_s = max(span.stop_s for span in here)


def test_a_prediction_is_the_cost_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are `simulate`'s. Rates come from a file, if not given; nothing is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, model = twins(stack()[0])
    slow = Hardware("slow", 1e-3, 1e-3, 1e-3, 1e-3, 1.0, 1.0, 0.0)
    with trace(model, hardware=slow) as t, trace(model) as unknown:
        step(model, stack()[1])
    assert t.predicted is not None
    total = sum(Timeline(t.predicted.of_run(i)).total_s for i in range(2))
    schedule = t.measured.runs[1].schedule
    assert schedule is not None
    assert total == pytest.approx(simulate(schedule, slow).total_s)
    assert "predicted busy ms" in t.table() and "predicted" not in unknown.table()
    assert unknown.predicted is None
