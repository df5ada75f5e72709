"""The picture: what stands in it, and what is said where it cannot be drawn."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacompile import trace
from megacompile.cost.hardware import H200
from megacompile.errors import MissingExtraError, TraceError
from megacompile.tracing import plot
from megacompile.tracing.critical_path import Period, critical_path
from megacompile.tracing.timeline import OpInfo, Span, Timeline
from tests.zoo import stack, step, twins

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def a_trace() -> Any:
    _, model = twins(stack()[0])
    with trace(model, hardware=H200) as t:
        step(model, stack()[1])
    return t


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'megacompile\[viz\]'"):
        a_trace().plot(str(tmp_path / "step.png"))
    assert issubclass(MissingExtraError, ImportError)
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert re.search(r'^viz = \["matplotlib', pyproject, re.MULTILINE)


@pytest.mark.parametrize(
    ("points", "name", "wanted"),
    [
        (100.0, "3RECOMPUTE", "3RECOMPUTE"),
        (70.0, "2PREFETCH@1", "2PREFETCH@1"),
        (60.0, "2PREFETCH@1", "2PREFETCH"),
        (10.0, "3RECOMPUTE", "3"),
        (10.0, "10.1PREFETCH@1", ""),
        (3.0, "3F", ""),
        (10.0, "SNAPSHOT", ""),
    ],
)
def test_as_much_of_a_name_as_fits(points: float, name: str, wanted: str) -> None:
    assert plot.name_in(points, name) == wanted


def test_a_row_a_stream_and_model() -> None:
    def span(model: str, lane: str) -> Span:
        return Span(OpInfo("0F", "forward", lane, ""), 0.0, 1.0, model, -1)

    timeline = Timeline((span("a", "compute"), span("b", "host"), span("a", "h2d")))
    rows = [("a", "h2d"), ("a", "compute"), ("b", "host")]
    assert plot.lanes(timeline) == rows
    assert plot.lanes(replace(timeline, order=("c", "b", "a"))) == [rows[2], *rows[:2]]


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib, the extra viz")
def test_what_stands_in_the_picture(tmp_path: Path) -> None:
    t = a_trace()
    for ending, magic in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        t.plot(str(tmp_path / f"step.{ending}"))
        assert (tmp_path / f"step.{ending}").read_bytes().startswith(magic)
    figure = plot._figure(t.measured, t.predicted)
    titles = [axis.get_title(loc="left").partition(":")[0] for axis in figure.axes]
    assert titles == ["predicted, NVIDIA H200", "measured, cpu", "device memory"]
    above = [axis.get_position().y0 for axis in figure.axes]
    assert above == sorted(above, reverse=True)
    for axis in figure.axes[:2]:
        rows = [label.get_text().replace("\n", " ") for label in axis.get_yticklabels()]
        assert rows == ["to the device (h2d)", "compute", "to the host (d2h)"]
        bars = sum(len(c.get_paths()) for c in axis.collections)
        assert bars == len(t.spans)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    kinds = ["prefetch", "forward", "recompute", "backward", "offload grad"]
    assert legend == [*kinds, "critical path"]
    assert figure.axes[0].get_legend().get_title().get_text() == "op (number: its stage)"
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    box = figure.axes[0].get_legend().get_window_extent(renderer)
    assert box.x0 >= figure.axes[0].get_window_extent(renderer).x1, "outside of the bars"
    assert box.x1 <= figure.bbox.x1, "and inside of the picture"
    for axis, timeline in zip(figure.axes, (t.predicted, t.measured), strict=False):
        (path,) = axis.lines
        whole = Period(timeline.start_s, timeline.stop_s, 1)
        chunks = [p for p in critical_path(timeline, "Stack", whole) if p.span is not None]
        assert len(path.get_xdata()) == 3 * len(chunks) > 0
    shown = {text.get_text() for axis in figure.axes[:2] for text in axis.texts}
    texts = [text for axis in figure.axes[:2] for text in axis.texts]
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    known = {span.op.name for span in t.spans}
    assert shown <= known | {name.partition("@")[0] for name in known} | set("0123456789")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib, the extra viz")
def test_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="needed an ending among"):
        a_trace().plot(str(tmp_path / "step.docx"))
    _, model = twins(stack()[0])
    with trace(model) as nothing:
        pass
    with pytest.raises(TraceError, match="nothing ran"):
        nothing.plot(str(tmp_path / "step.png"))
