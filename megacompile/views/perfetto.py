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
    for rank, (whole, start_s) in enumerate(zip(documents, starts_s, strict=True)):
        before = max((event["pid"] for event in events), default=0)
        for event in whole["traceEvents"]:
            moved = {**event, "pid": before + event["pid"]}
            if "ts" in event:
                moved["ts"] = round(event["ts"] + _us(start_s - starts_s[0]), 3)
            if event["name"] == "process_name":
                of_rank = {k: f"rank {rank}: {event['args'][k]}" for k in ("name", "model")}
                moved["args"] = {**event["args"], **of_rank}
            events.append(moved)
    return {**documents[0], "traceEvents": events}


def document(measured: Timeline, predicted: Timeline | None = None) -> dict[str, Any]:
    """The file's JSON object."""
    events: list[dict[str, Any]] = []
    pid = 0
    for model in measured.models:
        for timeline, what in ((measured, "measured"), (predicted, "predicted")):
            if timeline is not None and any(span.model == model for span in timeline.spans):
                pid += 1
                events += _process(pid, model, what, timeline)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "megacompile", "device": measured.device},
    }


def _process(pid: int, model: str, what: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    name = f"{model}, {what}" + (f" on {timeline.device}" if timeline.device else "")
    facts = {"name": name, "model": model, "what": what, "device": timeline.device}
    yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": facts}
    threads = {lane: tid for tid, lane in enumerate(timeline.lanes, start=1)}
    for lane, tid in threads.items():
        at = {"ph": "M", "pid": pid, "tid": tid}
        yield {"name": "thread_name", "args": {"name": lane}, **at}
        yield {"name": "thread_sort_index", "args": {"sort_index": tid}, **at}
    for span in timeline.spans:
        if span.model == model:
            at = {"ts": _us(span.start_s), "pid": pid}
            yield {
                "name": span.op.name,
                "cat": span.op.kind,
                "ph": "X",
                "dur": max(0.0, round(_us(span.stop_s) - _us(span.start_s), 3)),
                "tid": threads[span.op.lane],
                "args": _facts(span, timeline),
                **at,
            }
            if (size := span.memory_bytes) is not None:
                yield {"name": "device memory", "ph": "C", "args": {"bytes": size}, **at}


def _facts(span: Span, timeline: Timeline) -> dict[str, Any]:
    size, has_run = span.op.size_bytes, span.run >= 0
    facts = {
        "op": span.op.kind,
        "module": span.op.module or None,
        "bytes": size or None,
        "GB/s": round(size / span.duration_s / 1e9, 3) if size and span.duration_s > 0 else None,
        "device memory bytes": span.memory_bytes,
        "graph": timeline.runs[span.run].graph if has_run else None,
        "run": span.run if has_run else None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def load(path: str | Path) -> tuple[Timeline, Timeline | None]:
    """Read a file that `save` wrote: the measured timeline, and the predicted one if there was one.

    The runs have no schedules.

    Raises:
        TraceError: not such a file.
    """
    try:
        events = json.loads(Path(path).read_text())["traceEvents"]
        measured, predicted = (_read(events, what) for what in ("measured", "predicted"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(
            f"load(): {str(path)!r} is not a trace that megacompile saved ({error!r})"
        ) from error
    if not measured.spans:
        raise TraceError(f"load(): {str(path)!r} has no measured ops")
    return measured, predicted if predicted.spans else None


def _read(events: list[dict[str, Any]], what: str) -> Timeline:
    """The measured or the predicted timeline of a file."""
    processes = {e["pid"]: e["args"] for e in events if e["name"] == "process_name"}
    processes = {pid: args for pid, args in processes.items() if args["what"] == what}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ops = [event for event in events if event["ph"] == "X"]
    # a file of part of a trace has only some runs
    graphs = {e["args"]["run"]: e["args"]["graph"] for e in ops if "run" in e["args"]}
    place = {run: k for k, run in enumerate(sorted(graphs))}
    models: dict[int, str] = {}  # of the runs
    spans = []
    for event in ops:
        if event["pid"] in processes:
            args, model = event["args"], processes[event["pid"]]["model"]
            lane, size = lanes[event["pid"], event["tid"]], args.get("bytes", 0)
            op = OpInfo(event["name"], args["op"], lane, args.get("module", ""), size)
            start, run = event["ts"] / 1e6, place.get(args.get("run"), -1)
            memory = args.get("device memory bytes")
            spans.append(Span(op, start, start + event["dur"] / 1e6, model, run, memory))
            models[run] = model
    runs = tuple(Run(models.get(k, ""), graphs[run], None) for run, k in place.items())
    each = list(processes.values())
    order = tuple(args["model"] for args in each)
    return Timeline(in_order(spans), runs, each[0]["device"] if each else "", order)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
