"""The choice that comes nearest to the budgets, where none is within all of them.

It is what a refusal shows: what it lacks is the least memory that would make the step fit, as far
as the search goes. What waits on the host or is computed again leaves the device less to hold, so
the device may have too little with neither, and the host with both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacompile.ir.plan import Choice
from megacompile.passes.schedule.plan import ROWS
from megacompile.plan.problem import Problem

DEVICE, HOST, DISK = "device memory", "host memory", "the disk"


def nearest(problem: Problem) -> Choice:
    """The choice that lacks the fewest bytes, of all memories together."""
    return min(_candidates(problem), key=lambda choice: sum(lacking(problem, choice).values()))


def lacking(problem: Problem, choice: Choice) -> dict[str, int]:
    """Bytes that a choice needs beyond the budgets, by memory; empty where it fits."""
    host, there = problem.host_bytes(choice), problem.host_budget_bytes
    found = {
        DEVICE: problem.peak_bytes(choice) - problem.budget_bytes,
        HOST: 0 if there is None else host - there,
        DISK: problem.tiers.of_disk(choice) - (problem.disk_budget_bytes or 0),
    }
    return {memory: size for memory, size in found.items() if size > 0}


def _candidates(problem: Problem) -> Iterator[Choice]:
    """With as many residents as fit, and with none; what stages take waits on the device, or on
    the host as far as it must; rows of stages run again, or none does."""
    tightest = problem.tightest()
    for places in dict.fromkeys((tightest.places, problem.here)):
        for rerun in (0, *map(problem.reruns, ROWS)):
            choice = replace(tightest, places=places, rerun=rerun)
            few = problem.fewest_offloaded(choice)
            for offload in sorted({0, problem.stages if few is None else few}):
                yield problem.settled(replace(choice, offload=offload))
