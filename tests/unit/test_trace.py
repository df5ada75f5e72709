"""Traces: every op of a run with its times; what adds up; the file for Perfetto; the picture."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import megacompile
from megacompile import Trace, schedules, trace
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.simulate import simulate
from megacompile.errors import MissingExtraError, ModelError, TraceError
from megacompile.ir import ops, values
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.tracing import perfetto, plot
from megacompile.tracing.recorder import Tracer
from megacompile.tracing.timeline import HOST, OpInfo, Span, Timeline, covered_s, cut
from tests import inside
from tests.schedules import Spec, build
from tests.trace_events import faults
from tests.zoo import Made, batchnorm, stack, step, tied, twins

QUIET = (ops.free, ops.defer_free, ops.begin)


def tracer_of(model: Any) -> Any:
    return inside.machine(model).tracer


def names(spans: Iterable[Span]) -> list[str]:
    return [span.op.name for span in spans]


def wanted(schedule: Schedule | None, graph: str) -> list[fx.Node]:
    assert schedule is not None
    return [n for n in ops.nodes_of(schedule.graphs[graph]) if n.target not in QUIET]


# --- CUDA, played


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Events whose times are a counter; gives what was asked of which stream, the last entry of
    which says where work is issued."""
    log: list[tuple[str, Any]] = [("stream", "user")]
    ticks = itertools.count(101.0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any = None) -> None:
            self.ms = next(ticks)
            here = [name for kind, name in log if kind == "stream"][-1]
            log.append(("record", stream or here))

        def synchronize(self) -> None:
            log.append(("synchronize", None))

        def elapsed_time(self, other: Any) -> float:
            return float(other.ms - self.ms)

    stats = {"allocated_bytes": {"all": {"current": 77}}}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: "new")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    return log


def test_on_cuda_events_stand_around_the_work_and_nothing_waits(
    cuda: list[tuple[str, Any]],
) -> None:
    tracer = Tracer(torch.device("cuda", 0))
    assert ("record", "user") not in cuda, "the clock is read on a stream of its own"
    recording = tracer.run(build(Spec(stages=2, training=False)), "forward")
    begun = len(cuda)
    recording.next_op()
    prefetch = recording.timed(lambda: cuda.append(("work", "prefetch")))
    recording.next_op()
    recording.next_op()
    forward = recording.timed(lambda: cuda.append(("work", "forward")))
    assert recording.timed(int) is int, "what is no op of the table is left alone"
    forward()
    cuda.append(("stream", "h2d"))  # put off until now
    prefetch()
    assert [entry for entry in cuda[begun:] if entry[0] != "stream"] == [
        *(("record", "user"), ("work", "forward"), ("record", "user")),
        *(("record", "h2d"), ("work", "prefetch"), ("record", "h2d")),
    ]
    marks = {mark.info.name: mark for mark in tracer.marks}
    assert {name: mark.memory_bytes for name, mark in marks.items()} == {
        "0PREFETCH@0": None,
        "0F": 77,
    }
    for mark in marks.values():
        assert tracer.clock.at_s(mark.stop) - tracer.clock.at_s(mark.start) == pytest.approx(0.001)


def test_nobody_waits_for_what_has_failed_in_the_background() -> None:
    tracer = Tracer(torch.device("cpu"))
    recording = tracer.run(build(Spec(stages=2)), "update")
    recording.next_op()

    def fails() -> None:
        raise ValueError("in the update")

    with pytest.raises(ValueError, match="in the update"):
        recording.in_background()(HOST, fails)
    (mark,) = tracer.marks
    assert mark.done is not None and mark.done.is_set()


def test_ops_that_overlap_and_a_part_of_a_timeline() -> None:
    info = OpInfo("0F", "forward", "compute", "")
    timeline = Timeline(tuple(Span(info, at, at + 2.0, "m", -1) for at in (0.0, 1.0, 5.0)))
    assert timeline.busy_s("compute") == 5.0
    part = cut(timeline, 1.5, 4.0)
    assert [(span.start_s, span.stop_s) for span in part.spans] == [(0.0, 0.5), (0.0, 1.5)]


# --- on a GPU


class Deep(nn.Module):
    """Layers large enough that copies and computes overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.gpu
def test_on_a_gpu_the_spans_keep_the_schedules_edges() -> None:
    """What an op waits for is over when it begins, across streams too (by 10 us of resolution)."""
    model = megacompile.megacompile(Deep(), lowering="eager", resident=0, activations="recompute")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 2048, device="cuda")
    for _ in range(3):
        with trace(model) as t:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [run.graph for run in t.measured.runs] == ["forward", "backward", "update"]
    for i, run in enumerate(t.measured.runs[:2]):  # the update's are all of the host
        nodes = wanted(run.schedule, run.graph)
        by_name = {span.op.name: span for span in t.measured.of_run(i)}
        assert set(by_name) == {ops.label(n) for n in nodes}
        for node in nodes:
            for source in map(values.producer, node.all_input_nodes):
                if source in nodes:
                    earlier, later = by_name[ops.label(source)], by_name[ops.label(node)]
                    assert earlier.stop_s <= later.start_s + 1e-5, (earlier, later)
    updates = [span for span in t.spans if span.op.lane == HOST]
    assert len(updates) == len(schedules(model)[0].buckets)
    device = [span for span in t.spans if span.op.lane != HOST]
    assert min(u.start_s for u in updates) >= max(s.stop_s for s in device) - 1e-3, "one axis"
    peak = max(size for _, size in t.measured.memory())
    assert 0 < peak <= torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda e: e.update(tid=9), "thread (1, 9) has no name"),
        (lambda e: e.update(dur=1.5e6), "1F overlaps the one before it"),
    ],
)
def test_faults_in_a_file_are_found(change: Any, fault: str) -> None:
    info = OpInfo("0F", "forward", "compute", "layers.0")
    spans = (
        Span(info, 0.0, 1.0, "m", -1),
        Span(OpInfo("1F", "forward", "compute", "layers.1"), 1.0, 2.0, "m", -1),
    )
    document = perfetto.document(Timeline(spans, (), "cpu"))
    assert faults(document) == []
    change(next(e for e in document["traceEvents"] if e["name"] == "0F"))
    assert fault in faults(document)


# --- the prediction


def test_a_prediction_has_the_ops_that_were_measured(timelines: tuple[Timeline, Timeline]) -> None:
    measured, predicted = timelines
    for i in range(len(measured.runs)):
        wanted = Counter(span.op for span in measured.of_run(i))
        assert Counter(span.op for span in predicted.of_run(i)) == wanted
        start = min(span.start_s for span in measured.of_run(i))
        assert min(span.start_s for span in predicted.of_run(i)) == pytest.approx(start)


# Read again.


def test_what_was_saved_is_read_again(timelines: tuple[Timeline, Timeline], tmp_path: Path) -> None:
    """All but the schedules."""
    perfetto.save(tmp_path / "step.json", *timelines)
    document = json.loads((tmp_path / "step.json").read_text())
    assert faults(document) == [] == faults(perfetto.document(timelines[0]))
    perfetto.save(tmp_path / "alone.json", timelines[0])
    assert perfetto.load(tmp_path / "alone.json")[1] is None
    for wanted, got in zip(timelines, perfetto.load(tmp_path / "step.json"), strict=True):
        assert got is not None
        assert got.device == wanted.device
        assert got.models == wanted.models
        assert [(r.model, r.graph) for r in got.runs] == [(r.model, r.graph) for r in wanted.runs]
        for a, b in zip(got.spans, wanted.spans, strict=True):
            for name in ("name", "kind", "lane", "module", "size_bytes"):
                assert getattr(a.op, name) == getattr(b.op, name)
            assert (a.model, a.run, a.memory_bytes) == (b.model, b.run, b.memory_bytes)
            assert a.start_s == pytest.approx(b.start_s, abs=1e-8)
            assert a.stop_s == pytest.approx(b.stop_s, abs=2e-8)


def test_what_stands_in_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, model = twins(stack()[0])
    with trace(model, hardware=H200) as t:
        step(model, stack()[1])
    for ending, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        t.plot(str(tmp_path / f"step.{ending}"))
        assert (tmp_path / f"step.{ending}").read_bytes().startswith(magic)
    figure = plot._figure(t.measured, t.predicted)
    titles = [axis.get_title(loc="left").partition(":")[0] for axis in figure.axes]
    assert titles == ["predicted, NVIDIA H200", "measured, cpu", "device memory"]
    for axis in figure.axes[:2]:
        rows = [label.get_text().replace("\n", " ") for label in axis.get_yticklabels()]
        assert rows == ["to the device (h2d)", "compute", "to the host (d2h)"]
        bars = sum(len(c.get_paths()) for c in axis.collections)
        assert bars == len(t.spans)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [text for axis in figure.axes[:2] for text in axis.texts]
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


# --- one model for many cases


class Clock:
    """Stands in for the host's clock: it moves on when it is read, and when told."""

    TICK_S = 2.0**-20

    def __init__(self) -> None:
        self.now_s = 0.0
        self._lock = threading.Lock()  # the host's updates run in a thread of their own

    def advance(self, seconds: float) -> float:
        with self._lock:
            self.now_s += seconds
            return self.now_s

    def perf_counter(self) -> float:
        return self.advance(self.TICK_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in = Clock()
    monkeypatch.setattr(time, "perf_counter", stand_in.perf_counter)
    return stand_in


@pytest.mark.parametrize("made", [batchnorm, tied], ids=lambda made: made.__name__)
def test_every_op_is_recorded_in_its_order(made: Any) -> None:
    """And an op begins when what it waits for is over."""
    model_and_inputs: Made = made()
    _, model = twins(model_and_inputs[0])
    for _ in range(2):  # the second accumulates
        before = time.perf_counter()
        with trace(model) as t:
            step(model, model_and_inputs[1])
        length = time.perf_counter() - before
        assert [run.graph for run in t.measured.runs] == ["forward", "backward"]
        for i, run in enumerate(t.measured.runs):
            nodes, spans = wanted(run.schedule, run.graph), t.measured.of_run(i)
            assert names(spans) == [ops.label(n) for n in nodes]
            assert [span.op.lane for span in spans] == [ops.stream_of(n).value for n in nodes]
            at = dict(zip(nodes, spans, strict=True))
            for node, span in at.items():
                assert 0.0 <= span.start_s <= span.stop_s <= length
                for source in map(values.producer, node.all_input_nodes):
                    assert source not in at or at[source].stop_s <= span.start_s
    assert any(span.op.kind == "fetch_grad" for span in t.spans)


def test_a_trained_model(clock: Clock) -> None:
    """Lengths, bytes, updates of the host as a lane, sums, blocks in blocks, failures."""
    _, model = twins(stack()[0])
    inputs = stack()[1]
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, inputs)
    (schedule,) = schedules(model)
    with trace(model) as alone:  # the forward that named the buckets ran before
        optimizer.step()
    assert names(alone.spans) == [f"{bucket.label}UPDATE" for bucket in schedule.buckets]
    assert "Stack update x1" in alone.table()
    optimizer.zero_grad()
    codes = schedule.stages[1].traced.code
    honest = codes[Code.FORWARD]

    def slow(given: Any) -> Any:
        clock.advance(0.02)
        return honest(given)

    codes[Code.FORWARD] = slow
    with trace(model) as t:
        assert not t.spans and "nothing ran" in t.table()
        step(model, inputs)
        half = len(t.spans)
        optimizer.step()
    codes[Code.FORWARD] = honest
    assert 0 < half < len(t.spans) and "over" in repr(t)
    sizes = {bucket.name: bucket.size_bytes for bucket in schedule.buckets}
    for span in t.spans:
        like = {str(s.index) for s in schedule.stages if s.traced is schedule.stages[1].traced}
        late = span.op.kind == "forward" and span.op.name[:-1] in like
        if span.op.lane != HOST:
            assert span.duration_s == pytest.approx(Clock.TICK_S + 0.02 * late), span
        if span.op.kind == "prefetch":
            assert span.op.size_bytes == sizes[span.op.module]
        elif span.op.kind in ("forward", "recompute", "backward"):
            assert span.op.size_bytes == 0
            assert span.op.module == schedule.stages[int(re.sub(r"\D", "", span.op.name))].name
    updates = [span for span in t.spans if span.op.lane == HOST]
    assert sorted(names(updates)) == sorted(f"{b.label}UPDATE" for b in schedule.buckets)
    assert {t.measured.runs[span.run].graph for span in updates} == {"update"}
    last = max(span.stop_s for span in t.spans if span.op.lane != HOST)
    assert min(span.start_s for span in updates) >= last, "one time axis"
    found = t.measured
    for lane in found.lanes:
        spans = [span for span in t.spans if span.op.lane == lane]
        busy_s = covered_s((span.start_s, span.stop_s) for span in spans)
        assert found.busy_s(lane) == pytest.approx(busy_s) and busy_s <= found.total_s
    counts = Counter(span.op.kind for span in t.spans)
    totals = t.to_dict()["measured"]
    assert totals["streams"]["compute"]["busy_s"] == found.busy_s("compute")
    rows = {line.split()[0]: line.split() for line in t.table().splitlines() if line}
    assert rows["prefetch"][1:3] == ["h2d", str(counts["prefetch"])]
    assert float(rows["compute"][1]) == pytest.approx(found.busy_s("compute") * 1e3, abs=1e-3)
    for code, graph, op in ((Code.FORWARD, "forward", ops.forward),
                            (Code.BACKWARD, "backward", ops.backward)):  # fmt: skip
        honest = codes[code]

        def fail(given: Any) -> Any:
            raise ValueError("in the stage")

        codes[code] = fail
        model.zero_grad()
        with pytest.raises(ValueError, match="in the stage"), trace(model) as failed:
            step(model, inputs)
        codes[code] = honest
        assert tracer_of(model) is None and failed.spans, "what ran is there"
        done = names(failed.spans)
        same = schedule.stages[1].traced
        found_ops = ops.nodes_of(schedule.graphs[graph], op)
        first = next(n for n in found_ops if ops.arguments(n)[0].traced is same)
        assert ops.label(first) not in done
    with trace(model) as again:
        step(model, inputs)
    assert [run.graph for run in again.measured.runs] == ["forward", "backward"]


def test_blocks_of_several_traces_models_and_threads() -> None:
    """Each has its part, on an axis of its own; outside of all nothing is recorded."""
    models = [twins(stack()[0])[1] for _ in range(2)]
    model, inputs = models[0], stack()[1]
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
    with trace(*models, models[0]) as both:
        for each in models:
            step(each, inputs)
    assert [run.model for run in both.measured.runs] == ["Stack", "Stack", "Stack 2", "Stack 2"]
    assert both.measured.of_run(1)[-1].stop_s <= both.measured.of_run(2)[0].start_s
    found: dict[int, Trace] = {}

    def run(i: int) -> None:
        with trace(models[i]) as found[i]:
            for _ in range(5):
                models[i](**inputs)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(found[i].measured.runs) for i in range(2)] == [5, 5]
    assert tracer_of(models[0]) is tracer_of(models[1]) is None
    for wrong in ((nn.Linear(2, 2),), ()):
        with pytest.raises(ModelError):
            trace(*wrong)


# --- files and pictures


@pytest.fixture(scope="module")
def timelines() -> tuple[Timeline, Timeline]:
    """Two steps of two models, measured and predicted."""
    models = [twins(stack()[0])[1] for _ in range(2)]
    with trace(*models, hardware=H200) as t:
        for _ in range(2):
            for model in models:
                step(model, stack()[1])
    assert t.predicted is not None
    return t.measured, t.predicted


def test_a_prediction_is_the_cost_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lengths are those of `simulate`, whatever was measured. Rates come from a file, if they
    are not given; nothing is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, model = twins(stack()[0])
    slow = Hardware("slow", 1e-3, 1e-3, 1e-3, 1e-3, 1.0, 1.0, 0.0)
    with trace(model, hardware=slow) as t, trace(model) as unknown:
        step(model, stack()[1])
    assert t.predicted is not None
    total = sum(t.predicted.run_s(i) for i in range(2))
    schedule = t.measured.runs[1].schedule
    assert schedule is not None
    assert total == pytest.approx(simulate(schedule, slow).total_s)
    rows = [line.split() for line in t.table().splitlines() if line.startswith("Stack ")]
    assert [row[1] for row in rows[-2:]] == ["forward", "backward"]
    assert sum(float(row[-2]) for row in rows[-2:]) == pytest.approx(total * 1e3, rel=1e-2)
    assert [g["runs"] for g in t.to_dict()["predicted"]["graphs"]] == [1, 1]
    assert unknown.predicted is None and unknown.to_dict()["predicted"] is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"traceEvents": [{}], "otherData": {"device": ""}}', "null"]
    + ['{"traceEvents": [], "otherData": {"device": "cpu"}}'],
)
def test_a_file_that_is_no_trace(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    for name in ("other.json", "gone.json"):
        with pytest.raises(TraceError, match=name):
            perfetto.load(tmp_path / name)


def test_pictures_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = twins(stack()[0])
    with trace(model) as nothing:
        pass
    for name in ("step.png", "step.docx"):
        with pytest.raises(TraceError):
            nothing.plot(str(tmp_path / name))
    with trace(model) as t:
        step(model, stack()[1])
    with pytest.raises(TraceError):
        t.plot(str(tmp_path / "step.docx"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError) as error:
        t.plot(str(tmp_path / "step.png"))
    assert isinstance(error.value, ImportError)
