"""The machine of a benchmark: its rates, versions and commit; and the table of results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch


def environment() -> dict[str, str]:
    """The machine and the versions of a result."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "gpu": gpu,
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "commit": os.environ.get("MEGACOMPILE_COMMIT") or _commit(),
        "command": " ".join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
        ),
    }


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measure_alone() -> None:
    """Measure the GPU's rates, if they are not on file: processes that begin beside one another
    would each measure a part of them, and plan with that."""
    subprocess.run(
        [sys.executable, "-m", "megacompile", "hardware"], check=True, stdout=subprocess.DEVNULL
    )


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as a Markdown table; a column for each key, empty where a row lacks it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(title: str, rows: Sequence[Mapping[str, object]], path: str | None) -> None:
    """Print the result; with `path`, write it there as Markdown, with the rows as JSON."""
    text = "\n".join(
        [
            f"# {title}",
            "",
            *(f"- {key}: {value}" for key, value in environment().items()),
            "",
            table(rows),
            "",
            "```json",
            *(json.dumps(dict(row)) for row in rows),
            "```",
            "",
        ]
    )
    print(text)
    if path:
        Path(path).write_text(text)
