"""Every loop, by name."""

from __future__ import annotations

from benchmarks.loops import libraries, others, texts
from benchmarks.loops.loop import Loop

_ALL = [*texts.LOOPS, *others.LOOPS, *libraries.LOOPS]
LOOPS: dict[str, Loop] = {
    loop.name: loop for first in (True, False) for loop in _ALL if loop.first is first
}
