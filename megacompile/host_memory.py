"""How much host memory this process can still get, and the check that an allocation fits in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megacompile.errors import HostMemoryError
from megacompile.text import format_bytes

MARGIN_BYTES = 256 * 2**20  # left free for everything else in the process


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


def available_bytes() -> int:
    """Host memory that this process can still get: what is free, within its cgroup's limit."""
    free = _meminfo_bytes("MemAvailable")
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used + (_cgroup_stat("inactive_file") or 0))
    return free


def _meminfo_bytes(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    found = next(line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024


def _cgroup_bytes(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _cgroup_stat(name: str) -> int | None:
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), None)
