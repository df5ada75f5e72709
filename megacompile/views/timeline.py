"""Timelines: spans on lanes, measured or predicted, and their sums.

A lane is a stream of the schedule (h2d, compute, d2h), or an updater of host memory in
`optimizer.step()`: the host, or the device that helps it. Times are in seconds from the start of
the trace. On CUDA, device memory is the size that the allocator reported when an op was issued,
shown at the op's start: the allocator reuses memory in stream order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from megacompile.cost.hardware import Hardware
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.simulate import Event, Prediction, simulate
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.text import columns, format_bytes, percent

HOST, DEVICE = "host", "device"
UPDATERS = (HOST, DEVICE)
COMM = "comm"  # collectives of ranks that share the model
LANES = ("h2d", COMM, "compute", "d2h", *UPDATERS)
_OPTIONAL = (COMM, *UPDATERS)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """Static facts about an op."""

    name: str  # as printed: "3F", "2PREFETCH@1"
    kind: str  # of the op: "forward", "prefetch"
    lane: str
    module: str  # path of its unit, "layers.3", or ""
    size_bytes: int = 0  # that a copy or a collective moves

    @classmethod
    def of(cls, node: fx.Node) -> OpInfo:
        """The facts about the op of a schedule's node."""
        op = ops.op_of(node)
        assert op is not None
        subject: Any = node.args[0] if node.args else None
        module = subject.name if isinstance(subject, Bucket | Stage) else ""
        return cls(ops.label(node), op.name, op.stream.value, module, ops.moved_bytes(node))


@dataclass(frozen=True, slots=True)
class Span:
    """One op with its start and end."""

    op: OpInfo
    start_s: float
    stop_s: float
    model: str
    run: int  # index into Timeline.runs
    memory_bytes: int | None = None  # device memory when it was issued, on CUDA

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one of a schedule's graphs."""

    model: str
    graph: str  # "forward", "backward" or "update"
    schedule: Schedule = field(repr=False)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans, ordered by start."""

    spans: tuple[Span, ...]
    runs: tuple[Run, ...] = ()
    device: str = ""

    @property
    def total_s(self) -> float:
        """Seconds from the first op's start to the last op's end."""
        start_s = min((span.start_s for span in self.spans), default=0.0)
        return max((span.stop_s for span in self.spans), default=0.0) - start_s

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes with spans; h2d, compute and d2h are always included if anything ran."""
        used = {span.op.lane for span in self.spans}
        known = tuple(lane for lane in LANES if lane in used or (used and lane not in _OPTIONAL))
        return known + tuple(sorted(used - set(LANES)))

    def busy_s(
        self, lane: str, model: str | None = None, within: tuple[float, float] | None = None
    ) -> float:
        """Busy seconds of a lane `within` a start and stop (default: everything); overlapping spans
        (of two models) count once."""
        spans = [s for s in self.spans if s.op.lane == lane and model in (None, s.model)]
        end, last = within or (float("-inf"), float("inf"))
        total = 0.0
        for start, stop in sorted((s.start_s, min(s.stop_s, last)) for s in spans):
            if stop > max(start, end):
                total += stop - max(start, end)
                end = stop
        return total

    def of_run(self, run: int) -> tuple[Span, ...]:
        """The spans of one run of a graph."""
        return tuple(span for span in self.spans if span.run == run)


def in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans ordered by start; of equal starts, the longer span first."""
    return tuple(sorted(spans, key=lambda span: (span.start_s, -span.stop_s)))


# Totals of measured and predicted timelines as a table.


def table(measured: Timeline, predicted: Timeline | None = None) -> str:
    """A table of times by stream and by kind of op."""
    if not measured.spans:
        return "nothing ran while the trace was on"
    counts = Counter((run.model, run.graph) for run in measured.runs)
    ran = ", ".join(f"{model} {graph} x{n}" for (model, graph), n in counts.items())
    total = measured.total_s
    head = f"{_ms(total)} ms on {measured.device}: {ran}"
    if sizes := [s.memory_bytes for s in measured.spans if s.memory_bytes is not None]:
        head += f"; device memory up to {format_bytes(max(sizes))}"
    streams = [["stream", "busy ms", "idle ms", "busy"]]
    streams[0] += [] if predicted is None else ["predicted busy ms"]
    for lane in measured.lanes:
        busy = measured.busy_s(lane)
        streams.append([lane, _ms(busy), _ms(total - busy), percent(busy, total)])
        if predicted is not None:
            known = any(span.op.lane == lane for span in predicted.spans)
            streams[-1].append(_ms(predicted.busy_s(lane)) if known else "-")
    return "\n\n".join([head, columns(streams), columns(_kind_rows(measured), left=(0, 1))])


def _kind_rows(timeline: Timeline) -> list[list[str]]:
    """Totals by lane and kind of op, the longest first in each lane."""
    lanes, groups = timeline.lanes, defaultdict[tuple[int, str], list[Span]](list)
    for span in timeline.spans:
        groups[lanes.index(span.op.lane), span.op.kind].append(span)
    each = [(k, sum(s.duration_s for s in spans), spans) for k, spans in groups.items()]
    rows = [["op", "stream", "count", "ms", "ms each", "bytes", "GB/s"]]
    for (_, kind), busy_s, spans in sorted(each, key=lambda row: (row[0][0], -row[1], row[0][1])):
        size = sum(span.op.size_bytes for span in spans)
        rate = size / busy_s / 1e9 if busy_s else 0.0
        rows.append([kind, spans[0].op.lane, str(len(spans)), _ms(busy_s)])
        rows[-1] += [_ms(busy_s / len(spans)), format_bytes(size) if size else ""]
        rows[-1].append(f"{rate:.3g}" if rate else "")
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if abs(seconds) < 0.1 else f"{seconds * 1e3:.1f}"


# Predicted timelines, aligned with a measured one.


def predicted(
    measured: Timeline,
    hardware: Hardware,
    optimizers: Mapping[str, OptimizerCost],  # by model
) -> Timeline:
    """Predict each measured run, starting at its measured start."""
    steps: dict[int, Prediction] = {}  # by id of the schedule
    alike: dict[tuple[int, str], list[Span]] = {}  # spans of one run of each graph
    spans: list[Span] = []
    for i, run in enumerate(measured.runs):
        if not (ran := measured.of_run(i)):
            continue
        key = id(run.schedule)
        if key not in steps:
            steps[key] = simulate(run.schedule, hardware, optimizer=optimizers[run.model])
        if (key, run.graph) not in alike:
            events = [event for event in steps[key].events if event.graph == run.graph]
            infos = describe(run.schedule, run.graph)
            alike[key, run.graph] = list(predicted_spans(infos, events, run.model, i))
        like = alike[key, run.graph]
        later_s = min(s.start_s for s in ran) - min((s.start_s for s in like), default=0.0)
        spans += (
            replace(span, start_s=later_s + span.start_s, stop_s=later_s + span.stop_s, run=i)
            for span in like
        )
    return Timeline(in_order(spans), measured.runs, hardware.name)


def predicted_spans(
    infos: Sequence[OpInfo], events: Sequence[Event], model: str, run: int
) -> Iterator[Span]:
    """The spans of a run of one graph, without `begin` and frees."""
    left: defaultdict[str, deque[OpInfo]] = defaultdict(deque)
    for info in infos:
        left[info.name].append(info)
    for event in events:
        if left[event.label]:
            info = replace(left[event.label].popleft(), lane=event.stream.value)
            yield Span(info, event.start_s, event.stop_s, model, run)


def describe(schedule: Schedule, graph_name: str) -> tuple[OpInfo, ...]:
    """The ops of a graph in program order, except `begin`, `free` and `defer_free`."""
    nodes = ops.nodes_that(schedule.graphs[graph_name], lambda op: op.issues)
    return tuple(map(OpInfo.of, nodes))


# The trace event format of ui.perfetto.dev. Each model has a process for the measurement and one
# for the prediction, with a thread per lane; "X" events are ops, "C" events device memory. Times
# are in microseconds.
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU


def together(documents: Sequence[dict[str, Any]], starts_s: Sequence[float]) -> dict[str, Any]:
    """Merge the documents of all ranks into one, in which each rank has its own processes.
    `starts_s`: start of each rank's trace, on a common clock."""
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
    """The file's JSON object; `predicted` gets its own processes."""
    events: list[dict[str, Any]] = []
    each = ((measured, "measured"), (predicted, "predicted"))
    shown = [
        (model, what, timeline)
        for model in dict.fromkeys(run.model for run in measured.runs)
        for timeline, what in each
        if timeline is not None and any(span.model == model for span in timeline.spans)
    ]
    for pid, process in enumerate(shown, start=1):
        events += _process(pid, *process)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "megacompile", "device": measured.device},
    }


def _process(pid: int, model: str, what: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    name, device = f"{model}, {what} on {timeline.device}", timeline.device
    facts = {"name": name, "model": model, "what": what, "device": device}
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
                "args": {k: v for k, v in _facts(span, timeline).items() if v is not None},
                **at,
            }
            if (size := span.memory_bytes) is not None:
                yield {"name": "device memory", "ph": "C", "args": {"bytes": size}, **at}


def _facts(span: Span, timeline: Timeline) -> dict[str, Any]:
    size, time_s = span.op.size_bytes, span.duration_s
    return {
        "op": span.op.kind,
        "module": span.op.module or None,
        "bytes": size or None,
        "GB/s": round(size / time_s / 1e9, 3) if size and time_s > 0 else None,
        "device memory bytes": span.memory_bytes,
        "graph": timeline.runs[span.run].graph,
        "run": span.run,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
