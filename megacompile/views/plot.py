"""Plots a timeline: streams over time, the prediction above the measurement, and memory.

Each op is a bar, colored by its kind and labeled if the name fits: "3RECOMPUTE", or just the
stage's number "3". A line below the bars shows the critical path
(`megacompile.views.critical_path`), unless the timeline was read from a file, which has no edges.
Needs matplotlib, the extra `viz`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megacompile.errors import MissingExtraError, TraceError
from megacompile.views.critical_path import Period, critical_path
from megacompile.views.timeline import COMM, DEVICE, HOST, Span, Timeline

_COLOURS = {  # distinct with any kind of color vision (Okabe and Ito, 2008), and tints
    "prefetch": "#56B4E9",
    "prefetch_shard": "#56B4E9",
    "all_gather": "#5A6FA8",
    "reduce_scatter": "#8E6C8A",
    "all_reduce": "#6F4E6B",
    "fetch_saved": "#1C7FB8",
    "fetch_grad": "#0072B2",
    "fetch_state": "#A6D8F5",
    "forward": "#009E73",
    "recompute": "#8FD3BD",
    "rerun": "#C3E8DC",
    "backward": "#E69F00",
    "norm_grad": "#F0E442",
    "add_grad": "#B8A800",
    "update": "#CC79A7",
    "update_host": "#CC79A7",
    "update_resident": "#CC79A7",
    "update_in_place": "#CC79A7",
    "offload_saved": "#B03A00",
    "offload_grad": "#D55E00",
    "offload_state": "#F2A37A",
}
_OTHER = "#9A9A9A"
# Too short to need a color.
_QUIET = (
    "reuse",
    "resident",
    "alloc_saved",
    "alloc_grad",
    "alloc_state",
    "alloc_shard",
    "save_rng",
)
_NAMES = {
    "h2d": "to the device\n(h2d)",
    "d2h": "to the host\n(d2h)",
    COMM: "between ranks\n(comm)",
    HOST: "update on\nthe host",
    DEVICE: "helped by\nthe device",
}
_INCHES, _LANE_INCHES, _MEMORY_INCHES = 13.0, 0.5, 1.6
_LEFT_INCHES, _RIGHT_INCHES = 1.3, 1.75  # for lane names and the legend
_FONT = 8.0  # points
_BAR = 0.74  # of a lane's height
_THIN = 2.0  # points; thinner bars get no white edge, which would hide them
_PATH = "#202020"


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
    figure.savefig(path, dpi=150, format=ending)


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
    panels = [(measured, "measured")]
    if predicted is not None and predicted.spans:
        panels.insert(0, (predicted, "predicted"))
    rows = [lanes(timeline) for timeline, _ in panels]
    has_memory = any(timeline.memory() for timeline, _ in panels)
    heights = [_LANE_INCHES * len(lane) for lane in rows] + [_MEMORY_INCHES] * has_memory
    inches = sum(heights) + 0.45 * len(heights) + 0.7
    figure = Figure(figsize=(_INCHES, inches))
    axes = figure.subplots(
        len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    start = min(timeline.start_s for timeline, _ in panels)
    stop = max(timeline.stop_s for timeline, _ in panels)
    unit, name = (1.0, "s") if stop - start >= 10 else (1e3, "ms")
    points = (_INCHES - _LEFT_INCHES - _RIGHT_INCHES) * 72 / max((stop - start) * unit, 1e-9)
    for axis, (timeline, what), row in zip(axes, panels, rows, strict=False):
        _streams(axis, timeline, row, start, unit, points)
        head = f"{what}, {timeline.device}" if timeline.device else what
        total = f"{timeline.total_s * unit:.4g} {name}"
        axis.set_title(f"{head}: {total}", loc="left", fontsize=_FONT + 2)
    if has_memory:
        _memory(axes[-1], panels, start, unit, stop)
    axes[-1].set_xlabel(f"time in {name}", fontsize=_FONT + 1)
    axes[-1].set_xlim(0, max((stop - start) * unit, 1e-9))
    figure.subplots_adjust(
        left=_LEFT_INCHES / _INCHES,
        right=1 - _RIGHT_INCHES / _INCHES,
        top=1 - 0.35 / inches,
        bottom=0.5 / inches,
        hspace=0.5 * len(heights) / sum(heights),
    )
    has_path = any(run.schedule is not None for timeline, _ in panels for run in timeline.runs)
    _legend(figure, [s for timeline, _ in panels for s in timeline.spans], has_path=has_path)
    return figure


def lanes(timeline: Timeline) -> list[tuple[str, str]]:
    """The rows of the picture, (model, lane), from top to bottom."""
    used = {(span.model, span.op.lane) for span in timeline.spans}
    every = [(model, lane) for model in timeline.models for lane in timeline.lanes]
    return [row for row in every if row in used]


def name_in(width_points: float, name: str, font: float = _FONT) -> str:
    """The part of an op's name that fits into a bar: all of it, its number, or nothing."""
    number = re.match(r"[\d.]*", name)
    assert number is not None
    for text in (name, name.partition("@")[0], number[0]):
        if text and _points(text) * font + 2 <= width_points:
            return text
    return ""


def _points(text: str) -> float:
    """Approximate width of a text in DejaVu Sans, in ems."""
    return sum({".": 0.32, "_": 0.5, "@": 1.0}.get(c, 0.64 if c.isdigit() else 0.7) for c in text)


def _streams(
    axis: Any,
    timeline: Timeline,
    rows: Sequence[tuple[str, str]],
    start: float,
    unit: float,
    points: float,
) -> None:
    place = {row: len(rows) - 1 - i for i, row in enumerate(rows)}
    for kind in dict.fromkeys(span.op.kind for span in timeline.spans):
        for row, y in place.items():
            spans = [
                span
                for span in timeline.spans
                if span.op.kind == kind and (span.model, span.op.lane) == row
            ]
            if spans:
                thin = [span.duration_s * unit * points < _THIN for span in spans]
                axis.broken_barh(
                    [((span.start_s - start) * unit, span.duration_s * unit) for span in spans],
                    (y - _BAR / 2, _BAR),
                    facecolors=_colour(kind),
                    edgecolors=[_colour(kind) if is_thin else "white" for is_thin in thin],
                    linewidth=0.4,
                )
    for model in timeline.models:
        _path(axis, timeline, model, place, start, unit)
    for span in timeline.spans:
        text = name_in(span.duration_s * unit * points, span.op.name)
        if text:
            axis.text(
                ((span.start_s + span.stop_s) / 2 - start) * unit,
                place[span.model, span.op.lane],
                text,
                ha="center",
                va="center",
                fontsize=_FONT,
                color=_ink(_colour(span.op.kind)),
                clip_on=True,
            )
    several = len({model for model, _ in rows}) > 1
    axis.set_yticks(
        [place[row] for row in rows],
        [f"{model} {lane}" if several else _NAMES.get(lane, lane) for model, lane in rows],
        fontsize=_FONT + 1,
    )
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", labelsize=_FONT)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _path(
    axis: Any,
    timeline: Timeline,
    model: str,
    place: Mapping[tuple[str, str], int],
    start: float,
    unit: float,
) -> None:
    """Draw the critical path as a line below the bars."""
    whole = Period(timeline.start_s, timeline.stop_s, 1)
    xs: list[float] = []
    ys: list[float] = []
    for chunk in critical_path(timeline, model, whole):
        if chunk.span is not None:
            y = place[model, chunk.span.op.lane] - _BAR / 2 - 0.07
            xs += [(chunk.start_s - start) * unit, (chunk.stop_s - start) * unit, math.nan]
            ys += [y, y, math.nan]
    axis.plot(xs, ys, color=_PATH, linewidth=1.8, solid_capstyle="butt")


def _memory(
    axis: Any, panels: Sequence[tuple[Timeline, str]], start: float, unit: float, stop: float
) -> None:
    peak = max(size for timeline, _ in panels for _, size in timeline.memory())
    power = min(3, max(0, int(math.log(peak, 1024)))) if peak else 0
    scale, name = 1024.0**power, ("B", "KiB", "MiB", "GiB")[power]
    styles = {"measured": ("#333333", "-"), "predicted": ("#999999", "--")}
    for timeline, what in panels:
        points = timeline.memory()
        if points:
            seconds, sizes = zip(*points, (stop, points[-1][1]), strict=True)
            colour, style = styles[what]
            axis.step(
                [(s - start) * unit for s in seconds],
                [size / scale for size in sizes],
                where="post",
                color=colour,
                linestyle=style,
                linewidth=1.3,
                label=what,
            )
    axis.set_ylim(0, peak / scale * 1.1 if peak else 1)
    axis.set_ylabel(name, fontsize=_FONT + 1)
    axis.set_title("device memory", loc="left", fontsize=_FONT + 2)
    axis.tick_params(labelsize=_FONT)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=_FONT, borderaxespad=0
    )


def _legend(figure: Any, spans: Sequence[Span], *, has_path: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {span.op.kind for span in spans}
    shown = [kind for kind in _COLOURS if kind in kinds]
    names = {_name(kind): _COLOURS[kind] for kind in shown}
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in names.items()]
    if kinds - set(shown) - set(_QUIET):
        handles.append(Patch(color=_OTHER, label="other"))
    if has_path:
        handles.append(Line2D([], [], color=_PATH, linewidth=1.8, label="critical path"))
    figure.axes[0].legend(
        handles=handles,
        title="op (number: its stage)",
        alignment="left",
        title_fontsize=_FONT,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        fontsize=_FONT,
        borderaxespad=0,
    )


def _colour(kind: str) -> str:
    return _COLOURS.get(kind, _OTHER)


def _name(kind: str) -> str:
    """Name of an op's kind in the legend, the same for all kinds of updates."""
    return "update" if kind.startswith("update") else kind.replace("_", " ")


def _ink(colour: str) -> str:
    """Black or white, whichever has more contrast on a color (luminance by Rec. 709)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.45 else "white"
