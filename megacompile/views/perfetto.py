"""Saves a timeline in the trace event format of ui.perfetto.dev and chrome://tracing.

Each model has one process for the measurement and one for the prediction, with a thread per lane, a
complete event ("X") per op, and counter events ("C") for device memory; times are in microseconds.
The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacompile.errors import TraceError
from megacompile.views.timeline import OpInfo, Run, Span, Timeline, in_order


def save(path: str | Path, measured: Timeline, predicted: Timeline | None = None) -> None:
    """Write a file; `predicted` gets its own processes."""
    write(path, document(measured, predicted))


def write(path: str | Path, whole: dict[str, Any]) -> None:
    """Write the result of `document` or `together`."""
    Path(path).write_text(json.dumps(whole) + "\n")


def together(documents: Sequence[dict[str, Any]], starts_s: Sequence[float]) -> dict[str, Any]:
    """Merge the documents of several ranks into one, in which each rank has its own processes.

    Args:
        documents: by rank.
        starts_s: start of each rank's trace, on a common clock.
    """
    events: list[dict[str, Any]] = []
    pids = 0
    for rank, (whole, start_s) in enumerate(zip(documents, starts_s, strict=True)):
        later_us, before = _us(start_s - starts_s[0]), pids
        for event in whole["traceEvents"]:
            moved = {**event, "pid": before + event["pid"]}
            pids = max(pids, moved["pid"])
            if "ts" in event:
                moved["ts"] = round(event["ts"] + later_us, 3)
            if event["name"] == "process_name":
                moved["args"] = {"name": f"rank {rank}: {event['args']['name']}"}
            elif event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": moved["pid"]}
            events.append(moved)
    return {**documents[0], "traceEvents": events}


def document(measured: Timeline, predicted: Timeline | None = None) -> dict[str, Any]:
    """The file's JSON object."""
    events: list[dict[str, Any]] = []
    pid = 0
    for model in measured.models:
        for timeline, what in ((measured, "measured"), (predicted, "predicted")):
            if timeline is None or all(span.model != model for span in timeline.spans):
                continue
            pid += 1
            where = f" on {timeline.device}" if timeline.device else ""
            events += _process(pid, f"{model}, {what}{where}", timeline, model)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "megacompile", "device": measured.device},
    }


def load(path: str | Path) -> tuple[Timeline, Timeline | None]:
    """Read a file that `save` wrote: the measured timeline, and the predicted one if there was one.

    The runs have no schedules.

    Raises:
        TraceError: not such a file.
    """
    try:
        whole = json.loads(Path(path).read_text())
        events, device = whole["traceEvents"], whole["otherData"]["device"]
        found = {what: _Read(events, what) for what in ("measured", "predicted")}
        measured = found["measured"].timeline(device)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"load(): {str(path)!r} is not a trace that megacompile saved ({error!r})"
        ) from error
    if not measured.spans:
        raise TraceError(f"load(): {str(path)!r} has no measured ops")
    predicted = found["predicted"].timeline(found["predicted"].where)
    return measured, predicted if predicted.spans else None


class _Read:
    """The measured or the predicted events of a file."""

    def __init__(self, events: list[dict[str, Any]], what: str) -> None:
        names = [e for e in events if e["ph"] == "M" and e["name"] == "process_name"]
        marks = {e["pid"]: e["args"]["name"].rpartition(f", {what}") for e in names}
        self.models = {pid: model for pid, (model, mark, _) in marks.items() if mark}
        places = [where for _, mark, where in marks.values() if mark]
        self.where = places[0].removeprefix(" on ") if places else ""
        threads = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
        self.lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in threads}
        ops = [e for e in events if e["ph"] == "X"]
        self.events = [e for e in ops if e["pid"] in self.models]
        # a file of part of a trace has only some runs
        graphs = {e["args"]["run"]: e["args"]["graph"] for e in ops if "run" in e["args"]}
        numbers = sorted(graphs)
        self.place = {run: k for k, run in enumerate(numbers)} | {-1: -1}
        model = {e["args"].get("run"): self.models.get(e["pid"], "") for e in self.events}
        self.runs = tuple(Run(model.get(run, ""), graphs[run], None) for run in numbers)

    def timeline(self, device: str) -> Timeline:
        spans = []
        for event in self.events:
            args, model = event["args"], self.models[event["pid"]]
            run = self.place[args.get("run", -1)]
            memory = args.get("device memory bytes")
            lane = self.lanes[event["pid"], event["tid"]]
            op = OpInfo(
                event["name"], args["op"], lane, args.get("module", ""), args.get("bytes", 0)
            )
            start = event["ts"] / 1e6
            spans.append(Span(op, start, start + event["dur"] / 1e6, model, run, memory))
        return Timeline(tuple(in_order(spans)), self.runs, device, tuple(self.models.values()))


def _process(pid: int, name: str, timeline: Timeline, model: str) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, 0, "process_name", {"name": name})
    yield _metadata(pid, 0, "process_sort_index", {"sort_index": pid})
    threads = {lane: tid for tid, lane in enumerate(timeline.lanes, start=1)}
    for lane, tid in threads.items():
        yield _metadata(pid, tid, "thread_name", {"name": lane})
        yield _metadata(pid, tid, "thread_sort_index", {"sort_index": tid})
    for span in timeline.spans:
        if span.model == model:
            yield _complete(pid, threads[span.op.lane], span, timeline)
            if span.memory_bytes is not None:
                yield _memory(pid, span)


def _metadata(pid: int, tid: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _complete(pid: int, tid: int, span: Span, timeline: Timeline) -> dict[str, Any]:
    op = span.op
    args: dict[str, Any] = {"op": op.kind}
    if op.module:
        args["module"] = op.module
    if op.size_bytes:
        args["bytes"] = op.size_bytes
        if span.duration_s > 0:
            args["GB/s"] = round(op.size_bytes / span.duration_s / 1e9, 3)
    if span.memory_bytes is not None:
        args["device memory bytes"] = span.memory_bytes
    if span.run >= 0:
        args["graph"] = timeline.runs[span.run].graph
        args["run"] = span.run
    return {
        "name": op.name,
        "cat": op.kind,
        "ph": "X",
        "ts": _us(span.start_s),
        "dur": max(0.0, round(_us(span.stop_s) - _us(span.start_s), 3)),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _memory(pid: int, span: Span) -> dict[str, Any]:
    return {
        "name": "device memory",
        "ph": "C",
        "ts": _us(span.start_s),
        "pid": pid,
        "args": {"bytes": span.memory_bytes},
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
