"""Timelines: spans on lanes, measured or predicted, and their sums.

A lane is a stream of the schedule (h2d, compute, d2h), or an updater of host memory in
`optimizer.step()`: the host, or the device that helps it. Times are in seconds from the start of
the trace. A lane is busy while it has a span.

Memory is the device's in the program order of the compute stream. On CUDA it is the size that the
allocator reported when an op was issued, shown at the op's start; this is valid although the host
runs ahead, because the allocator reuses memory in stream order. On other devices and in predictions
it comes from `megacompile.cost.memory`. Memory allocated and freed inside an op is not shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

from torch import fx

from megacompile.cost.hardware import Hardware
from megacompile.cost.memory import DeviceMemory, MemoryKind, device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.simulate import Event, Prediction, simulate
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.text import columns, format_bytes

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
    size_bytes: int = 0  # that a copy moves
    memory_bytes: int | None = None  # predicted device memory at its start, if the op changes it

    @classmethod
    def of(cls, node: fx.Node, memory_bytes: int | None = None) -> OpInfo:
        """The facts about the op of a schedule's node."""
        op = ops.op_of(node)
        assert op is not None
        subject: Any = node.args[0] if node.args else None
        module = subject.name if isinstance(subject, Bucket | Stage) else ""
        size = ops.copied_bytes(node)
        return cls(ops.label(node), op.name, op.stream.value, module, size, memory_bytes)


@dataclass(frozen=True, slots=True)
class Span:
    """One op with its start and end."""

    op: OpInfo
    start_s: float
    stop_s: float
    model: str
    run: int  # index into Timeline.runs
    memory_bytes: int | None = None  # device memory at its start

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one of a schedule's graphs."""

    model: str
    graph: str  # "forward", "backward" or "update"
    schedule: Schedule | None = field(repr=False)  # None: read from a file


@dataclass(frozen=True)
class KindTotal:
    """Totals of one kind of op on one lane."""

    kind: str
    stream: str  # the lane
    count: int
    busy_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans, ordered by start."""

    spans: tuple[Span, ...]
    runs: tuple[Run, ...] = ()
    device: str = ""
    order: tuple[str, ...] = ()  # of the models; default: of their first spans

    @property
    def models(self) -> tuple[str, ...]:
        """The models that have spans."""
        used = dict.fromkeys(span.model for span in self.spans)
        return tuple(dict.fromkeys([*(m for m in self.order if m in used), *used]))

    @property
    def start_s(self) -> float:
        """Start of the first op."""
        return min((span.start_s for span in self.spans), default=0.0)

    @property
    def stop_s(self) -> float:
        """End of the last op."""
        return max((span.stop_s for span in self.spans), default=0.0)

    @property
    def total_s(self) -> float:
        """Seconds from the first op's start to the last op's end."""
        return self.stop_s - self.start_s

    @property
    def lanes(self) -> tuple[str, ...]:
        """The lanes with spans; h2d, compute and d2h are always included if anything ran."""
        used = {span.op.lane for span in self.spans}
        known = tuple(lane for lane in LANES if lane in used or (used and lane not in _OPTIONAL))
        return known + tuple(sorted(used - set(LANES)))

    def busy_s(
        self, lane: str, model: str | None = None, within: tuple[float, float] | None = None
    ) -> float:
        """Busy seconds of a lane; overlapping spans (of two models) count once.

        Args:
            within: start and stop of the period; default: everything.
        """
        spans = [s for s in self.spans if s.op.lane == lane and model in (None, s.model)]
        start, stop = within or (float("-inf"), float("inf"))
        times = ((max(s.start_s, start), min(s.stop_s, stop)) for s in spans)
        return covered_s((begin, end) for begin, end in times if begin < end)

    def kinds(self) -> list[KindTotal]:
        """Totals by lane and kind of op, the longest first in each lane."""
        groups: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            groups[span.op.lane, span.op.kind].append(span)
        found = []
        for (lane, kind), spans in groups.items():
            busy_s = sum(span.duration_s for span in spans)
            size = sum(span.op.size_bytes for span in spans)
            found.append(KindTotal(kind, lane, len(spans), busy_s, size))
        rank = {lane: i for i, lane in enumerate(self.lanes)}
        return sorted(found, key=lambda total: (rank[total.stream], -total.busy_s, total.kind))

    def of_run(self, run: int) -> tuple[Span, ...]:
        """The spans of one run of a graph."""
        return tuple(span for span in self.spans if span.run == run)

    def run_s(self, run: int) -> float:
        """Seconds from the first start to the last end of a run's ops."""
        return Timeline(self.of_run(run)).total_s

    def memory(self) -> list[tuple[float, int]]:
        """Device memory as a step function of (second, bytes)."""
        points = [(s.start_s, s.memory_bytes) for s in self.spans if s.memory_bytes is not None]
        return sorted(points)

    def to_dict(self) -> dict[str, Any]:
        """The totals for programs, in seconds and bytes."""
        total, busy = self.total_s, {lane: self.busy_s(lane) for lane in self.lanes}
        return {
            "device": self.device,
            "total_s": total,
            "runs": [{"model": run.model, "graph": run.graph} for run in self.runs],
            "streams": {k: {"busy_s": b, "idle_s": total - b} for k, b in busy.items()},
            "ops": [asdict(kind) for kind in self.kinds()],
            "peak_memory_bytes": max((size for _, size in self.memory()), default=None),
        }


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def cut(timeline: Timeline, start_s: float, stop_s: float) -> Timeline:
    """Cut out the part between two times; spans are clipped and times shifted to start at 0."""
    spans = [
        replace(
            span,
            start_s=max(span.start_s, start_s) - start_s,
            stop_s=min(span.stop_s, stop_s) - start_s,
            memory_bytes=span.memory_bytes if span.start_s >= start_s else None,
        )
        for span in timeline.spans
        if span.stop_s > start_s and span.start_s < stop_s
    ]
    return replace(timeline, spans=tuple(spans))


def in_order(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Spans ordered by start; of equal starts, the longer span first."""
    return tuple(sorted(spans, key=lambda span: (span.start_s, -span.stop_s)))


# Totals of measured and predicted timelines, as data and as a table.


def totals(measured: Timeline, predicted: Timeline | None = None) -> dict[str, Any]:
    """The totals of both as JSON types, in seconds and bytes."""
    found: dict[str, Any] = {"measured": measured.to_dict(), "predicted": None}
    if predicted is not None:
        graphs = [each._asdict() for each in compare(measured, predicted)]
        found["predicted"] = {**predicted.to_dict(), "graphs": graphs}
    return found


def table(measured: Timeline, predicted: Timeline | None = None) -> str:
    """A table of times by stream and by kind of op and, with a prediction, its errors."""
    if not measured.spans:
        return "nothing ran while the trace was on"
    blocks = [_head(measured), _streams(measured, predicted), _ops(measured)]
    if predicted is not None:
        blocks.append(_graphs(measured, predicted))
    return "\n\n".join(blocks)


def _head(timeline: Timeline) -> str:
    counts = Counter((run.model, run.graph) for run in timeline.runs)
    ran = ", ".join(f"{model} {graph} x{n}" for (model, graph), n in counts.items())
    head = f"{_ms(timeline.total_s)} ms on {timeline.device or 'a device'}: {ran}"
    sizes = [size for _, size in timeline.memory()]
    return head + (f"; device memory up to {format_bytes(max(sizes))}" if sizes else "")


def _streams(measured: Timeline, predicted: Timeline | None) -> str:
    total = measured.total_s
    rows = [["stream", "busy ms", "idle ms", "busy"]]
    rows[0] += [] if predicted is None else ["predicted busy ms"]
    for lane in measured.lanes:
        busy = measured.busy_s(lane)
        rows.append([lane, _ms(busy), _ms(total - busy), f"{busy / total:.0%}" if total else "-"])
        if predicted is not None:
            known = any(span.op.lane == lane for span in predicted.spans)
            rows[-1].append(_ms(predicted.busy_s(lane)) if known else "-")
    return columns(rows)


def _ops(timeline: Timeline) -> str:
    rows = [["op", "stream", "count", "ms", "ms each", "bytes", "GB/s"]]
    for kind, lane, count, busy_s, size in map(astuple, timeline.kinds()):
        rate = size / busy_s / 1e9 if busy_s else 0.0
        rows.append([kind, lane, str(count), _ms(busy_s), _ms(busy_s / count)])
        rows[-1] += [format_bytes(size) if size else "", f"{rate:.3g}" if rate else ""]
    return columns(rows, left=(0, 1))


class Comparison(NamedTuple):
    """A graph's mean time over its runs, measured and predicted."""

    model: str
    graph: str
    runs: int
    measured_s: float
    predicted_s: float


def compare(measured: Timeline, predicted: Timeline) -> list[Comparison]:
    """Compare the runs that are both measured and predicted, by model and graph."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(measured.runs):
        if measured.of_run(i) and predicted.of_run(i):
            groups.setdefault((run.model, run.graph), []).append(i)
    return [
        Comparison(
            *key, len(runs), fmean(map(measured.run_s, runs)), fmean(map(predicted.run_s, runs))
        )
        for key, runs in groups.items()
    ]


def _graphs(measured: Timeline, predicted: Timeline) -> str:
    rows = [["graph", "runs", "measured ms each", "predicted ms each", "off by"]]
    found = compare(measured, predicted)
    runs = sum(each.runs for each in found)
    here_s = sum(each.measured_s * each.runs for each in found)
    there_s = sum(each.predicted_s * each.runs for each in found)
    each = [(f"{f.model} {f.graph}", f.runs, f.measured_s, f.predicted_s) for f in found]
    for name, count, measured_s, predicted_s in [*each, ("all, in total", runs, here_s, there_s)]:
        off = f"{predicted_s / measured_s - 1:+.0%}" if measured_s else "-"
        rows.append([name, str(count), _ms(measured_s), _ms(predicted_s), off])
    return columns(rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if abs(seconds) < 0.1 else f"{seconds * 1e3:.1f}"


# Predicted timelines: aligned with a measured one, or of whole steps.


def predicted(
    measured: Timeline,
    hardware: Hardware,
    optimizers: Mapping[str, OptimizerCost] | None = None,  # by model
) -> Timeline:
    """Predict each measured run, starting at its measured start. Updates of a model without an
    optimizer are not predicted."""
    steps: dict[int, tuple[Prediction, DeviceMemory]] = {}  # by id of the schedule
    alike: dict[tuple[int, str], list[Span]] = {}  # spans of one run of each graph
    spans: list[Span] = []
    for i, run in enumerate(measured.runs):
        if not (ran := measured.of_run(i)):
            continue
        assert run.schedule is not None, "a timeline that was read from a file"
        key = id(run.schedule)
        if key not in steps:
            optimizer = (optimizers or {}).get(run.model)
            memory = device_memory(run.schedule, optimizer=optimizer)
            steps[key] = simulate(run.schedule, hardware, optimizer=optimizer), memory
        step, memory = steps[key]
        if (key, run.graph) not in alike:
            events = [event for event in step.events if event.graph == run.graph]
            infos = describe(run.schedule, run.graph)
            alike[key, run.graph] = list(_spans(infos, events, memory, run.model))
        like = alike[key, run.graph]
        later_s = min(s.start_s for s in ran) - min((s.start_s for s in like), default=0.0)
        spans += (
            replace(span, start_s=later_s + span.start_s, stop_s=later_s + span.stop_s, run=i)
            for span in like
        )
    return Timeline(in_order(spans), measured.runs, hardware.name, measured.order)


def predicted_steps(
    schedule: Schedule,
    hardware: Hardware,
    optimizer: OptimizerCost | None,
    *,
    model: str = "",
    steps: int = 3,
) -> Timeline:
    """Predict consecutive whole steps, including updates, as a trace would show them.

    Unlike `predicted`, this needs no measured start times.
    """
    graphs = [name for name in schedule.graphs if name != "update" or optimizer is not None]
    runs = tuple(Run(model, graph, schedule) for _ in range(steps) for graph in graphs)
    simulated = simulate(schedule, hardware, optimizer=optimizer, steps=steps)
    memory = device_memory(schedule, optimizer=optimizer)
    infos = {graph: describe(schedule, graph) for graph in graphs}
    spans: list[Span] = []
    for run, (step, graph) in enumerate((step, graph) for step in range(steps) for graph in graphs):
        events = [e for e in simulated.events if (e.step, e.graph) == (step, graph)]
        spans += _spans(infos[graph], events, memory, model, run=run)
    return Timeline(in_order(spans), runs, hardware.name, (model,))


def _spans(
    infos: Sequence[OpInfo],
    events: Sequence[Event],
    memory: DeviceMemory,
    model: str,
    *,
    run: int = -1,
) -> Iterator[Span]:
    """The spans of a run of one graph, without `begin` and frees."""
    held = Held(memory)
    left: defaultdict[str, deque[OpInfo]] = defaultdict(deque)
    for info in infos:
        left[info.name].append(info)
    for event in events:
        if left[event.label]:
            info = replace(left[event.label].popleft(), lane=event.stream.value)
            size = held.next(event.graph, event.label)
            yield Span(info, event.start_s, event.stop_s, model, run, size)


# Static facts about a schedule's ops, for traces and predictions.


def describe(schedule: Schedule, graph_name: str) -> tuple[OpInfo, ...]:
    """The ops of a graph in program order, except `begin`, `free` and `defer_free`."""
    held = Held(device_memory(schedule))
    nodes = ops.nodes_that(schedule.graphs[graph_name], lambda op: op.issues)
    return tuple(OpInfo.of(node, held.next(graph_name, ops.label(node))) for node in nodes)


class Held:
    """Device memory at the start of each op, without its workspace; queried in program order."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._sizes: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        for moment in memory.moments:
            inside = moment.live_bytes.get(MemoryKind.WORKSPACE, 0)
            self._sizes[moment.graph, moment.label].append(moment.total_bytes - inside)

    def next(self, graph: str, label: str) -> int | None:
        """Bytes at the next op with this printed name; None if it does not change memory."""
        sizes = self._sizes[graph, label]
        return sizes.popleft() if sizes else None
