"""A row of a table from a process of its own, which prints as it goes and ends in time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_ROW = "ROW "


def tell(row: Mapping[str, object]) -> None:
    """In the process: its row."""
    print(_ROW + json.dumps(dict(row)), flush=True)


def run(name: str, module: str, arguments: Sequence[str], limit_s: float) -> dict[str, object]:
    """The row of `python -m module arguments`, whose other lines are printed behind `name`.
    "failed" in it says why there is none."""
    command = [sys.executable, "-u", "-m", module, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=_ROOT
    )
    row: dict[str, object] = {"failed": "no result"}
    end = time.monotonic() + limit_s
    timer = threading.Timer(limit_s, process.kill)
    timer.daemon = True
    timer.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(_ROW):
                row = json.loads(line[len(_ROW) :])
            else:
                print(f"[{name}] {line}", end="", flush=True)
    finally:
        timer.cancel()
        process.wait()
    if row.get("failed") == "no result":
        late = time.monotonic() >= end
        row["failed"] = f"after {limit_s:g} s" if late else f"exit status {process.returncode}"
    return row
