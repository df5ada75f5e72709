"""Four pictures of a run: against tokens, against GPU memory, host memory, the largest model.

Where only one number of tokens, or one size of GPU memory, was measured, bars show the throughput
there, or the peak of GPU memory.

    python -m benchmarks.peers.plot results.json picture.png

Needs matplotlib. A panel for which nothing was measured says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.store import load
from benchmarks.peers.summary import Row, gib, rows
from benchmarks.peers.work import MODELS, Setting

MISSING = "no plot: pip install matplotlib"

_INCHES = (14.0, 10.0)
_COLORS = [
    f"#{h}"
    for h in (
        "1f77b4 aec7e8 ff7f0e ffbb78 2ca02c 98df8a d62728 ff9896 9467bd c5b0d5 "
        "8c564b c49c94 e377c2 f7b6d2 7f7f7f c7c7c7 bcbd22 dbdb8d 17becf 9edae5"
    ).split()
]  # one for each system, the same in every picture


def draw(path: Path, of: Sequence[Row], *, gpu_gib: float | None = None) -> str:
    """Write the picture; gives a line that says so, or why not.

    Args:
        path: its ending names the format.
        of: what was measured.
        gpu_gib: memory of the GPU, which "all of it" stands for; None: there is none.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING
    figure = Figure(figsize=_INCHES, layout="constrained")
    panels = figure.subplots(2, 2).flatten().tolist()
    measured = [row for row in of if row.tokens_s is not None]
    colors = {peer: _COLORS[k % len(_COLORS)] for k, peer in enumerate(PEERS)}
    if not _lines(panels[0], measured, colors, _by_tokens, "tokens a step", None):
        _at_one(panels[0], measured, colors, "throughput", "tokens a second", _tokens_s)
    if not _lines(panels[1], measured, colors, _by_cap, "GPU memory, GiB", gpu_gib):
        _at_one(panels[1], measured, colors, "peak GPU memory", "GiB", _gpu_gib)
    _at_one(panels[2], measured, colors, "host memory", "GiB", _host_gib)
    _largest(panels[3], of, colors)
    figure.savefig(path, dpi=120)
    return f"{path} is written"


Axis = Callable[[Setting, float | None], tuple[Setting, float | None]]  # what stays, and x
Value = Callable[[Row], float | None]  # of a system


def _by_tokens(setting: Setting, gpu_gib: float | None) -> tuple[Setting, float | None]:
    return replace(setting, batch=0, length=0), float(setting.batch * setting.length)


def _by_cap(setting: Setting, gpu_gib: float | None) -> tuple[Setting, float | None]:
    return replace(setting, cap_gib=None), gpu_gib if setting.cap_gib is None else setting.cap_gib


def _lines(
    panel: Any,
    of: Sequence[Row],
    colors: dict[str, str],
    axis: Axis,
    label: str,
    gpu_gib: float | None,
) -> bool:
    """Throughput against one part of the setting, where that part varies most. False: it does not
    vary."""
    xs: dict[Setting, set[float]] = {}
    for row in of:
        rest, x = axis(row.setting, gpu_gib)
        if x is not None:
            xs.setdefault(rest, set()).add(x)
    chosen = max(xs, key=lambda rest: len(xs[rest]), default=None)
    if chosen is None or len(xs[chosen]) == 1:
        return False
    panel.set(xlabel=label, ylabel="tokens a second")
    for peer, color in colors.items():
        line = sorted(
            (x, row.tokens_s)
            for row in of
            for rest, x in [axis(row.setting, gpu_gib)]
            if row.peer == peer and rest == chosen and x is not None and row.tokens_s is not None
        )
        if line:
            panel.plot(*zip(*line, strict=True), marker="o", color=color, label=peer)
    panel.set_title(f"throughput by {label} ({chosen.model})")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7)
    return True


def _at_one(
    panel: Any, of: Sequence[Row], colors: dict[str, str], name: str, unit: str, value: Value
) -> None:
    """A value of each system, at the setting that most of them were measured at."""
    settings = [row.setting for row in of]
    panel.set(title=name, xlabel=unit)
    if not settings:
        _nothing(panel)
        return
    chosen = max(dict.fromkeys(settings), key=settings.count)
    panel.set_title(f"{name} ({chosen.text})")
    values = {row.peer: value(row) for row in of if row.setting == chosen}
    _bars(panel, {peer: found for peer, found in values.items() if found is not None}, colors)


def _tokens_s(row: Row) -> float | None:
    return row.tokens_s


def _gpu_gib(row: Row) -> float | None:
    return gib(row.median("gpu_bytes"))


def _host_gib(row: Row) -> float | None:
    return gib(row.median("host_bytes"))


def _largest(panel: Any, of: Sequence[Row], colors: dict[str, str]) -> None:
    """The largest model that each system has trained, at any setting."""
    places = list(MODELS)
    largest: dict[str, tuple[int, float]] = {}  # its place in MODELS, and its parameters, 1e9
    for row in of:
        if (count := row.median("parameters")) is not None:
            found = (places.index(row.setting.model), count / 1e9)
            largest[row.peer] = max(largest.get(row.peer, found), found)
    panel.set(title="largest model that was trained", xlabel="parameters, 1e9")
    if not largest:
        _nothing(panel)
        return
    exceeded = {
        row.peer
        for row in of
        if row.records
        and row.peer in largest
        and places.index(row.setting.model) > largest[row.peer][0]
    }
    panel.set_title("largest model (hatched: no larger one was tried)")
    bars = _bars(panel, {peer: size for peer, (_, size) in largest.items()}, colors)
    for bar, peer in zip(bars, list(largest)[::-1], strict=True):
        if peer not in exceeded:
            bar.set_hatch("///")


def _bars(panel: Any, sizes: dict[str, float], colors: dict[str, str]) -> Any:
    """Draw them, the first one on top; gives them from below."""
    names = list(sizes)[::-1]
    bars = panel.barh(names, [sizes[n] for n in names], color=[colors[n] for n in names])
    panel.margins(x=0.12)
    panel.bar_label(bars, fmt=_number, padding=2, fontsize=7)
    return bars


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _nothing(panel: Any) -> None:
    panel.text(0.5, 0.5, "nothing was measured", ha="center", transform=panel.transAxes)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; gives the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON of python -m benchmarks.peers")
    parser.add_argument("picture", type=Path)
    args = parser.parse_args(argv)
    results = load(args.results)
    said = draw(args.picture, rows(results), gpu_gib=results.runs[-1].get("gpu GiB"))
    print(said)
    return 1 if said == MISSING else 0


if __name__ == "__main__":
    sys.exit(main())
