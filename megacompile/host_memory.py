"""How much host memory this process can still get, and the check that an allocation fits in it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from megacompile.errors import HostMemoryError
from megacompile.text import format_bytes

MARGIN_BYTES = 256 * 2**20  # left free for everything else in the process
_SHARE = 0.04  # of what is free, left to what a plan does not know: compilers, data loaders
_SHARE_BYTES = 6 * 2**30  # at most: most of that does not grow with the memory


def check_host_memory(rows: Sequence[tuple[str, int]], limit_bytes: int | None = None) -> None:
    """Raise before anything is allocated if `rows` of (what, additional bytes) do not fit.

    Args:
        rows: (what, additional bytes).
        limit_bytes: what the user allows; None: what is free, less a margin.

    Raises:
        HostMemoryError: with the table.
    """
    needed = sum(size for _, size in rows)
    there = max(available_bytes() - MARGIN_BYTES, 0)
    if limit_bytes is not None:
        there = min(there, limit_bytes)
    if needed <= there:
        return
    width = max(len(what) for what, _ in rows)
    table = "\n".join(f"  {what:<{width}}  {format_bytes(size):>10}" for what, size in rows)
    raise HostMemoryError(
        f"megacompile(): host memory is too small\n{table}\n"
        f"  {'needed':<{width}}  {format_bytes(needed):>10}\n"
        f"  {'available':<{width}}  {format_bytes(there):>10}\n"
        "free host memory (or raise host_memory=), use a smaller dtype (model.bfloat16()), or "
        "freeze parameters (requires_grad_(False)), which need no gradients"
    )


def budget_bytes(held_bytes: int = 0) -> int:
    """Host memory that a model may take: what is free, and what it holds now, less a margin.

    Args:
        held_bytes: by the model, which gives it up for its buckets.
    """
    free = available_bytes() + held_bytes
    return max(0, free - max(MARGIN_BYTES, int(min(_SHARE * free, _SHARE_BYTES))))


def total_bytes() -> int:
    """Host memory that this process may have in all: the machine's, within its cgroup's limit."""
    return min(psutil.virtual_memory().total, _cgroup().get("max", sys.maxsize))


def available_bytes() -> int:
    """Host memory that this process can still get: what is free, within its cgroup's limit."""
    free: int = psutil.virtual_memory().available
    cgroup = _cgroup()
    if "max" in cgroup and "current" in cgroup:
        return min(free, cgroup["max"] - cgroup["current"] + cgroup.get("inactive_file", 0))
    return free


def _cgroup() -> dict[str, int]:
    """What the cgroup (v2) says of memory: "max" (a limit), "current", "inactive_file"; bytes."""
    found: dict[str, int] = {}
    for name in ("max", "current", "stat"):
        with contextlib.suppress(OSError):
            lines = Path("/sys/fs/cgroup", f"memory.{name}").read_text().splitlines()
            pairs = (f"{name} {line}" if name != "stat" else line for line in lines)
            found |= {k: int(v) for k, v in map(str.split, pairs) if v != "max"}
    return found
