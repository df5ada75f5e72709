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

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

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


@dataclass(frozen=True, slots=True)
class KindTotal:
    """Totals of one kind of op on one lane."""

    kind: str
    lane: str
    count: int
    busy_s: float
    size_bytes: int


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
        found = [
            KindTotal(
                kind,
                lane,
                len(spans),
                sum(span.duration_s for span in spans),
                sum(span.op.size_bytes for span in spans),
            )
            for (lane, kind), spans in groups.items()
        ]
        rank = {lane: i for i, lane in enumerate(self.lanes)}
        return sorted(found, key=lambda kind: (rank[kind.lane], -kind.busy_s, kind.kind))

    def of_run(self, run: int) -> tuple[Span, ...]:
        """The spans of one run of a graph."""
        return tuple(span for span in self.spans if span.run == run)

    def run_s(self, run: int) -> float:
        """Seconds from the first start to the last end of a run's ops."""
        spans = self.of_run(run)
        return Timeline(spans).total_s

    def memory(self) -> list[tuple[float, int]]:
        """Device memory as a step function of (second, bytes)."""
        points = [(s.start_s, s.memory_bytes) for s in self.spans if s.memory_bytes is not None]
        return sorted(points)

    def to_dict(self) -> dict[str, Any]:
        """The totals for programs, in seconds and bytes."""
        total = self.total_s
        memory = [size for _, size in self.memory()]
        return {
            "device": self.device,
            "total_s": total,
            "runs": [{"model": run.model, "graph": run.graph} for run in self.runs],
            "streams": {
                lane: {"busy_s": self.busy_s(lane), "idle_s": total - self.busy_s(lane)}
                for lane in self.lanes
            },
            "ops": [
                {
                    "kind": kind.kind,
                    "stream": kind.lane,
                    "count": kind.count,
                    "busy_s": kind.busy_s,
                    "bytes": kind.size_bytes,
                }
                for kind in self.kinds()
            ],
            "peak_memory_bytes": max(memory, default=None),
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
    spans = []
    for span in timeline.spans:
        if span.stop_s > start_s and span.start_s < stop_s:
            inside = max(span.start_s, start_s), min(span.stop_s, stop_s)
            memory = span.memory_bytes if span.start_s >= start_s else None
            spans.append(
                replace(
                    span,
                    start_s=inside[0] - start_s,
                    stop_s=inside[1] - start_s,
                    memory_bytes=memory,
                )
            )
    return replace(timeline, spans=tuple(spans))


def in_order(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans ordered by start; of equal starts, the longer span first."""
    return iter(sorted(spans, key=lambda span: (span.start_s, -span.stop_s)))


# Totals of measured and predicted timelines, as data and as a table.


def totals(measured: Timeline, predicted: Timeline | None = None) -> dict[str, Any]:
    """The totals of both as JSON types, in seconds and bytes."""
    found: dict[str, Any] = {"measured": measured.to_dict(), "predicted": None}
    if predicted is not None:
        graphs = [
            {
                "model": c.model,
                "graph": c.graph,
                "runs": c.count,
                "measured_s": c.measured_s,
                "predicted_s": c.predicted_s,
            }
            for c in compare(measured, predicted)
        ]
        found["predicted"] = {**predicted.to_dict(), "graphs": graphs}
    return found


# As text.


def table(measured: Timeline, predicted: Timeline | None = None) -> str:
    """A table of times by stream and by kind of op and, with a prediction, its errors."""
    if not measured.spans:
        return "nothing ran while the trace was on"
    blocks = [_head(measured), _streams(measured, predicted), _ops(measured)]
    if predicted is not None:
        blocks.append(_graphs(measured, predicted))
    return "\n\n".join(blocks)


def _head(timeline: Timeline) -> str:
    counts: dict[tuple[str, str], int] = {}
    for run in timeline.runs:
        counts[run.model, run.graph] = counts.get((run.model, run.graph), 0) + 1
    ran = ", ".join(f"{model} {graph} x{n}" for (model, graph), n in counts.items())
    head = f"{_ms(timeline.total_s)} ms on {timeline.device or 'a device'}: {ran}"
    sizes = [size for _, size in timeline.memory()]
    return head + (f"; device memory up to {format_bytes(max(sizes))}" if sizes else "")


def _streams(measured: Timeline, predicted: Timeline | None) -> str:
    total = measured.total_s
    rows = [["stream", "busy ms", "idle ms", "busy"]]
    if predicted is not None:
        rows[0].append("predicted busy ms")
    for lane in measured.lanes:
        busy = measured.busy_s(lane)
        share = f"{busy / total:.0%}" if total else "-"
        rows.append([lane, _ms(busy), _ms(total - busy), share])
        if predicted is not None:
            known = lane in {span.op.lane for span in predicted.spans}
            rows[-1].append(_ms(predicted.busy_s(lane)) if known else "-")
    return columns(rows)


def _ops(timeline: Timeline) -> str:
    rows = [["op", "stream", "count", "ms", "ms each", "bytes", "GB/s"]]
    for kind in timeline.kinds():
        rate = kind.size_bytes / kind.busy_s / 1e9 if kind.busy_s else 0.0
        rows.append(
            [
                kind.kind,
                kind.lane,
                str(kind.count),
                _ms(kind.busy_s),
                _ms(kind.busy_s / kind.count),
                format_bytes(kind.size_bytes) if kind.size_bytes else "",
                f"{rate:.3g}" if rate else "",
            ]
        )
    return columns(rows, left=(0, 1))


@dataclass(frozen=True, slots=True)
class Comparison:
    """A graph's mean time over the runs of one schedule, measured and predicted."""

    model: str
    graph: str
    count: int
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
            model,
            graph,
            len(runs),
            sum(map(measured.run_s, runs)) / len(runs),
            sum(map(predicted.run_s, runs)) / len(runs),
        )
        for (model, graph), runs in groups.items()
    ]


def _graphs(measured: Timeline, predicted: Timeline) -> str:
    rows = [["graph", "runs", "measured ms each", "predicted ms each", "off by"]]
    found = compare(measured, predicted)
    for one in found:
        name = f"{one.model} {one.graph}"
        rows.append(_compared(name, one.count, one.measured_s, one.predicted_s))
    sums = [
        sum(getattr(f, name) * f.count for f in found) for name in ("measured_s", "predicted_s")
    ]
    rows.append(_compared("all, in total", sum(f.count for f in found), *sums))
    return columns(rows)


def _compared(name: str, count: int, measured_s: float, predicted_s: float) -> list[str]:
    off = f"{predicted_s / measured_s - 1:+.0%}" if measured_s else "-"
    return [name, str(count), _ms(measured_s), _ms(predicted_s), off]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if abs(seconds) < 0.1 else f"{seconds * 1e3:.1f}"
