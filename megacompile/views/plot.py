"""Plots a timeline: streams over time, the prediction above the measurement, and memory.

Each op is a bar, colored by its kind and labeled if the name fits: "3RECOMPUTE", or just the
stage's number "3". A line below the bars shows the critical path
(`megacompile.views.critical_path`), unless the timeline was read from a file, which has no edges.
Needs matplotlib, the extra `viz`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from megacompile.errors import MissingExtraError, TraceError
from megacompile.views.critical_path import Period, critical_path
from megacompile.views.timeline import Timeline

_COLOURS = {  # distinct with any kind of color vision (Okabe and Ito, 2008), and tints
    "prefetch": "#56B4E9",
    "fetch_saved": "#0072B2",
    "fetch_grad": "#0072B2",
    "fetch_state": "#A6D8F5",
    "forward": "#009E73",
    "recompute": "#8FD3BD",
    "rerun": "#C3E8DC",
    "backward": "#E69F00",
    "update": "#CC79A7",
    "offload_saved": "#B03A00",
    "offload_grad": "#D55E00",
    "offload_state": "#F2A37A",
    "all_gather": "#5A6FA8",
    "reduce_scatter": "#8E6C8A",
    "all_reduce": "#6F4E6B",
    "other": "#9A9A9A",
}
_INCHES, _LANE_INCHES, _MEMORY_INCHES = 13.0, 0.5, 1.6
_AXIS_INCHES = 10.0  # what lane names and the legend leave
_FONT = 8.0  # points
_EM_POINTS = 5.4  # average width of a character of this size
_THIN = 2.0  # points; thinner bars get no white edge, which would hide them
_BAR = 0.74  # of a lane's height
_BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "fontsize": _FONT, "frameon": False}


def draw(path: str | Path, measured: Timeline, predicted: Timeline | None = None) -> None:
    """Write a picture; the suffix of `path` determines the format.

    Raises:
        MissingExtraError: matplotlib is not installed.
        TraceError: nothing was traced, or matplotlib does not know the suffix.
    """
    figure = _figure(measured, predicted)
    ending = Path(path).suffix.removeprefix(".") or "png"
    known = sorted(figure.canvas.get_supported_filetypes())
    if ending not in known:
        raise TraceError(f"plot(): got {str(path)!r}; needed a suffix among {', '.join(known)}")
    figure.savefig(path, dpi=150, format=ending, bbox_inches="tight")


def _figure(measured: Timeline, predicted: Timeline | None) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "plot(): matplotlib is not installed; pip install 'megacompile[viz]' "
            "(save('step.json') needs no extra; open the file in ui.perfetto.dev)"
        ) from error
    if not measured.spans:
        raise TraceError("plot(): the trace has no ops; call the model within its `with` block")
    panels = {"measured": measured}
    if predicted is not None and predicted.spans:
        panels = {"predicted": predicted, **panels}
    rows = [_rows(timeline) for timeline in panels.values()]
    has_memory = any(timeline.memory() for timeline in panels.values())
    heights = [_LANE_INCHES * len(each) for each in rows] + [_MEMORY_INCHES] * has_memory
    figure = Figure(figsize=(_INCHES, sum(heights) + 0.45 * len(heights)), layout="constrained")
    grid = {"height_ratios": heights}
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    start = min(timeline.start_s for timeline in panels.values())
    stop = max(timeline.stop_s for timeline in panels.values())
    unit, name = (1.0, "s") if stop - start >= 10 else (1e3, "ms")
    axes[-1].set_xlim(0, max((stop - start) * unit, 1e-9))
    axes[-1].set_xlabel(f"time in {name}")
    for axis, (what, timeline), row in zip(axes, panels.items(), rows, strict=False):
        _streams(axis, timeline, row, start, unit)
        head = f"{what}, {timeline.device}" if timeline.device else what
        axis.set_title(f"{head}: {timeline.total_s * unit:.4g} {name}", loc="left")
    if has_memory:
        _memory(axes[-1], panels, start, unit, stop)
    for axis in axes:
        axis.tick_params(labelsize=_FONT)
        axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    kinds = {_kind(span.op.kind) for timeline in panels.values() for span in timeline.spans}
    _legend(axes[0], [kind for kind in _COLOURS if kind in kinds])
    return figure


def _rows(timeline: Timeline) -> list[tuple[str, str]]:
    """(model, lane) of each row, from top to bottom."""
    used = {(span.model, span.op.lane) for span in timeline.spans}
    return [(m, lane) for m in timeline.models for lane in timeline.lanes if (m, lane) in used]


def _streams(
    axis: Any, timeline: Timeline, rows: list[tuple[str, str]], start: float, unit: float
) -> None:
    place = {row: -i for i, row in enumerate(rows)}
    points = _AXIS_INCHES * 72 / max(axis.get_xlim()[1], 1e-9)  # per unit of time
    bars = [
        (place[s.model, s.op.lane], (s.start_s - start) * unit, s.duration_s * unit, s.op)
        for s in timeline.spans
    ]
    axis.barh(
        [y for y, *_ in bars],
        [width for _, _, width, _ in bars],
        _BAR,
        [left for _, left, _, _ in bars],
        color=[_COLOURS[_kind(op.kind)] for *_, op in bars],
        edgecolor="white",
        linewidth=[0.4 * (width * points > _THIN) for _, _, width, _ in bars],
    )
    for y, left, width, op in bars:
        if text := _name_in(width * points, op.name):
            style = {"ha": "center", "va": "center", "fontsize": _FONT, "clip_on": True}
            axis.text(left + width / 2, y, text, **style)
    for model in timeline.models:
        xs, ys = list[float](), list[float]()
        for chunk in critical_path(timeline, model, Period(timeline.start_s, timeline.stop_s, 1)):
            if chunk.span is not None:
                below = place[model, chunk.lane] - _BAR / 2 - 0.07
                xs += [(chunk.start_s - start) * unit, (chunk.stop_s - start) * unit, math.nan]
                ys += [below, below, math.nan]
        axis.plot(xs, ys, color="black", linewidth=1.8)
    several = len(timeline.models) > 1
    names = [f"{model} {lane}" if several else lane for model, lane in rows]
    axis.set_yticks(list(place.values()), names)


def _name_in(width_points: float, name: str) -> str:
    """The part of an op's name that fits into a bar: all of it, its number, or nothing."""
    number = re.match(r"[\d.]*", name)
    assert number is not None
    shorter = (name, name.partition("@")[0], number[0])
    return next((text for text in shorter if len(text) * _EM_POINTS + 2 <= width_points), "")


def _memory(axis: Any, panels: dict[str, Timeline], start: float, unit: float, stop: float) -> None:
    peak = max(size for timeline in panels.values() for _, size in timeline.memory())
    power = min(3, max(0, int(math.log(peak, 1024)))) if peak else 0
    for what, timeline in panels.items():
        if points := timeline.memory():
            seconds, sizes = zip(*points, (stop, points[-1][1]), strict=True)
            times = [(s - start) * unit for s in seconds]
            style = "-" if what == "measured" else "--"
            heights = [size / 1024.0**power for size in sizes]
            axis.step(times, heights, style, where="post", color="#555555", label=what)
    axis.set_ylim(0)
    axis.set_ylabel(("B", "KiB", "MiB", "GiB")[power])
    axis.set_title("device memory", loc="left")
    axis.legend(**_BESIDE)


def _legend(axis: Any, kinds: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_COLOURS[kind], label=kind.replace("_", " ")) for kind in kinds]
    axis.legend(handles=handles, title="op (line: critical path)", **_BESIDE)


def _kind(op: str) -> str:
    """The kind of an op in the legend, the same for all updates and for all prefetches."""
    kind = op.partition("_")[0]
    kind = kind if kind in ("update", "prefetch") else op
    return kind if kind in _COLOURS else "other"
