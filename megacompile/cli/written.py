"""Writes the files of a trace."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megacompile.views import perfetto, plot
from megacompile.views.timeline import Timeline


def write(measured: Timeline, predicted: Timeline | None, paths: Sequence[Path]) -> None:
    """Write each of the files, and say so on stderr."""
    for path in paths:
        save = perfetto.save if path.suffix == ".json" else plot.draw
        save(path, measured, predicted)
        print(f"wrote {path}", file=sys.stderr)
