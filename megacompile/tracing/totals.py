"""The sums of a timeline, measured next to predicted: as data, and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megacompile.text import columns, format_bytes
from megacompile.tracing.timeline import Timeline


def totals(measured: Timeline, predicted: Timeline | None = None) -> dict[str, Any]:
    """The sums of both, in types that JSON has: seconds and bytes."""
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
    """The time of each stream, and of each kind of op; with a prediction, how far that was off."""
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
    """The runs that were predicted too, by model and graph."""
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
    rows.append(_compared("all of them, in all", sum(f.count for f in found), *sums))
    return columns(rows)


def _compared(name: str, count: int, measured_s: float, predicted_s: float) -> list[str]:
    off = f"{predicted_s / measured_s - 1:+.0%}" if measured_s else "-"
    return [name, str(count), _ms(measured_s), _ms(predicted_s), off]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if abs(seconds) < 0.1 else f"{seconds * 1e3:.1f}"
