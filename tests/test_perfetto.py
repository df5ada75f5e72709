"""The file for Perfetto: held against the trace event format, and against the spans."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megacompile import trace
from megacompile.cost import rates
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.simulate import simulate
from megacompile.errors import TraceError
from megacompile.tracing import perfetto, prediction
from megacompile.tracing.critical_path import critical_path
from megacompile.tracing.timeline import OpInfo, Span, Timeline, cut
from tests.zoo import stack, step, twins

NUMBER = (int, float)
REQUIRED: dict[
    str, dict[str, Any]
] = {  # by phase: the keys that the format asks for, and their types
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int},
    "M": {"name": str, "pid": int, "args": dict},
    "C": {"name": str, "ts": NUMBER, "pid": int, "args": dict},
}
METADATA = {  # name -> the key of its args
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def faults(document: Any) -> list[str]:
    """Where a document is not the JSON object form of the trace event format.

    Besides the keys: names before what they name is used, complete events of a thread nested or one
    after the other, counters with numbers.
    """
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    found = []
    if document.get("displayTimeUnit") not in ("ms", "ns"):
        found.append("displayTimeUnit")
    named: set[tuple[int, int | None]] = set()
    open_until: dict[tuple[int, int], list[float]] = {}
    complete = []
    for event in document["traceEvents"]:
        phase = event.get("ph")
        if phase not in REQUIRED:
            found.append(f"phase {phase!r}")
            continue
        wrong = [k for k, kind in REQUIRED[phase].items() if not isinstance(event.get(k), kind)]
        found += [f"{phase} {event.get('name')}: {key}" for key in wrong]
        if wrong:
            continue
        if phase == "M":
            if METADATA.get(event["name"], "?") not in event["args"]:
                found.append(f"metadata {event['name']}")
            if event["name"] == "process_name":
                named.add((event["pid"], None))
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        elif (event["pid"], None) not in named:
            found.append(f"process {event['pid']} has no name")
        if phase == "C" and not all(isinstance(v, NUMBER) for v in event["args"].values()):
            found.append(f"counter {event['name']}")
        if phase == "X":
            complete.append(event)
    for event in sorted(complete, key=lambda e: (e["ts"], -e["dur"])):
        key = (event["pid"], event["tid"])
        if key not in named:
            found.append(f"thread {key} has no name")
        if event["dur"] < 0:
            found.append(f"{event['name']} ends before it begins")
        stack_of = open_until.setdefault(key, [])
        while stack_of and stack_of[-1] <= event["ts"] + 1e-3:
            stack_of.pop()
        end = event["ts"] + event["dur"]
        if stack_of and end > stack_of[-1] + 1e-2:
            found.append(f"{event['name']} overlaps the one before it")
        stack_of.append(end)
    return found


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


def test_the_file_is_in_the_trace_event_format(
    timelines: tuple[Timeline, Timeline], tmp_path: Path
) -> None:
    perfetto.save(tmp_path / "step.json", *timelines)
    document = json.loads((tmp_path / "step.json").read_text())
    assert faults(document) == []
    assert faults(perfetto.document(timelines[0])) == []


def test_it_has_every_span_with_its_name_times_and_bytes(
    timelines: tuple[Timeline, Timeline],
) -> None:
    events = perfetto.document(*timelines)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == [
        "Stack, measured on cpu",
        "Stack, predicted on NVIDIA H200",
        "Stack 2, measured on cpu",
        "Stack 2, predicted on NVIDIA H200",
    ]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    complete = [e for e in events if e["ph"] == "X"]
    for timeline, what in zip(timelines, ("measured", "predicted"), strict=True):
        wanted = Counter(
            (s.model, s.op.lane, s.op.name, round(s.start_s * 1e6, 3), s.op.size_bytes)
            for s in timeline.spans
        )
        got = Counter(
            (
                processes[e["pid"]].partition(",")[0],
                threads[e["pid"], e["tid"]],
                e["name"],
                e["ts"],
                e["args"].get("bytes", 0),
            )
            for e in complete
            if what in processes[e["pid"]]
        )
        assert got == wanted
    prefetch = next(e for e in complete if e["cat"] == "prefetch")
    assert prefetch["args"]["module"] == "embed"
    assert prefetch["args"]["graph"] == "forward"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda e: e.pop("ts"), "X 0F: ts"),
        (lambda e: e.update(dur=-1.0), "0F ends before it begins"),
        (lambda e: e.update(tid=9), "thread (1, 9) has no name"),
        (lambda e: e.update(pid=9), "process 9 has no name"),
        (lambda e: e.update(ph="Z"), "phase 'Z'"),
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


def test_a_prediction_is_the_cost_models() -> None:
    """Its lengths are those of `simulate`, whatever was measured."""
    _, model = twins(stack()[0])
    slow = Hardware("slow", 1e-3, 1e-3, 1e-3, 1e-3, 1.0, 1.0, 0.0)
    with trace(model, hardware=slow) as t:
        step(model, stack()[1])
    assert t.predicted is not None
    total = sum(t.predicted.run_s(i) for i in range(2))
    schedule = t.measured.runs[1].schedule
    assert schedule is not None
    assert total == pytest.approx(simulate(schedule, slow).total_s)
    table = t.table()
    assert "predicted busy ms" in table
    rows = [line.split() for line in table.splitlines() if line.startswith("Stack ")]
    assert [row[1] for row in rows[-2:]] == ["forward", "backward"]
    shown = [float(row[-2]) for row in rows[-2:]]
    assert sum(shown) == pytest.approx(total * 1e3, rel=1e-2)
    together = table.splitlines()[-1].split()
    assert together[:6] == ["all", "of", "them,", "in", "all", "2"]
    assert float(together[-2]) == pytest.approx(total * 1e3, rel=1e-2)
    graphs = t.to_dict()["predicted"]["graphs"]
    assert [graph["runs"] for graph in graphs] == [1, 1]


def test_rates_on_file_are_used_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(device: Any) -> Hardware:
        raise AssertionError("measured")

    monkeypatch.setattr(rates, "measure", refused)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, model = twins(stack()[0])
    with trace(model) as t:
        step(model, stack()[1])
    assert t.predicted is None
    assert t.to_dict()["predicted"] is None
    file = rates._file(torch.device("cpu"))
    assert file is not None
    file.parent.mkdir()
    file.write_text(json.dumps(asdict(H200)))
    late: Any = t.predicted
    assert late.device == "NVIDIA H200"
    file.write_text('{"name": "of another version"}')
    assert prediction.on_file(torch.device("cpu")) is None


# Read again.


def test_what_was_saved_is_read_again(timelines: tuple[Timeline, Timeline], tmp_path: Path) -> None:
    """Two models, measured and predicted: all but the schedules."""
    perfetto.save(tmp_path / "step.json", *timelines)
    for wanted, got in zip(timelines, perfetto.load(tmp_path / "step.json"), strict=True):
        assert got is not None
        assert got.device == wanted.device
        assert got.models == wanted.models
        assert [(r.model, r.graph) for r in got.runs] == [(r.model, r.graph) for r in wanted.runs]
        assert all(run.schedule is None for run in got.runs)
        assert len(got.spans) == len(wanted.spans)
        for a, b in zip(got.spans, wanted.spans, strict=True):
            assert (a.op.name, a.op.kind, a.op.lane, a.op.module, a.op.size_bytes) == (
                b.op.name,
                b.op.kind,
                b.op.lane,
                b.op.module,
                b.op.size_bytes,
            )
            assert (a.model, a.run, a.memory_bytes) == (b.model, b.run, b.memory_bytes)
            assert a.start_s == pytest.approx(b.start_s, abs=1e-8)
            assert a.stop_s == pytest.approx(b.stop_s, abs=2e-8)
        assert critical_path(got, got.models[0]) == []
    again = perfetto.document(*perfetto.load(tmp_path / "step.json"))
    before = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    kinds = Counter((e["ph"], e["name"]) for e in before)
    assert Counter((e["ph"], e["name"]) for e in again["traceEvents"]) == kinds


def test_a_trace_without_a_prediction(timelines: tuple[Timeline, Timeline], tmp_path: Path) -> None:
    perfetto.save(tmp_path / "step.json", timelines[0])
    measured, predicted = perfetto.load(tmp_path / "step.json")
    assert predicted is None and len(measured.spans) == len(timelines[0].spans)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"traceEvents": [{}], "otherData": {"device": ""}}', "null"],
)
def test_a_file_that_is_no_trace(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(TraceError, match=r"other\.json.*is not a trace that megacompile saved"):
        perfetto.load(tmp_path / "other.json")


def test_a_file_with_nothing_in_it(tmp_path: Path) -> None:
    text = '{"traceEvents": [], "otherData": {"device": "cpu"}}'
    (tmp_path / "empty.json").write_text(text)
    with pytest.raises(TraceError, match="no ops that were measured"):
        perfetto.load(tmp_path / "empty.json")
    with pytest.raises(TraceError, match=r"gone\.json"):
        perfetto.load(tmp_path / "gone.json")


def test_a_part_of_a_trace_has_the_runs_that_are_in_it(
    timelines: tuple[Timeline, Timeline], tmp_path: Path
) -> None:
    measured, predicted = timelines
    start = measured.of_run(2)[0].start_s
    parts = [cut(timeline, start, timeline.stop_s) for timeline in (measured, predicted)]
    perfetto.save(tmp_path / "part.json", *parts)
    got, guess = perfetto.load(tmp_path / "part.json")
    assert guess is not None
    left = sorted({span.run for part in parts for span in part.spans if span.run >= 0})
    assert 0 < len(left) < len(measured.runs)
    assert [run.graph for run in got.runs] == [measured.runs[run].graph for run in left]
    assert {span.run for span in (*got.spans, *guess.spans)} - {-1} == set(range(len(left)))
    assert all(run.model for run in got.runs if run in guess.runs)
