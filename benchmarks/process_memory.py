"""Memory of this process, as the system reports it."""

from __future__ import annotations

from pathlib import Path


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, such as VmRSS (in RAM now) or VmHWM (the most so far)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def shared_bytes() -> int:
    """Memory of this process in RAM (Pss); what several processes map counts in parts."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
