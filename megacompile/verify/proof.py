"""Proves that a schedule is free of races, leaks and mix-ups; every schedule is checked before it
runs.

The checks read only the graphs, without device or data. What follows from them is true in every
interleaving of the streams: [Note: happens-before] in `megacompile.ir.edges`.

[Note: collectives of ranks] A collective completes when all ranks have issued it, and the
collectives of one rank complete in the order in which it issues them. So ranks must issue the same
sequence. A rank issues its collectives in program order in every interleaving, because they share
an in-order stream and the runtime lets none overtake a deferred one (`Streams._must_wait`), so its
sequence can be read from its graph.

With equal sequences there is no deadlock. All ops of a rank can run in program order, because edges
that point backward are hazards. The program orders of ranks, joined at each collective, are an
order in which all ops of all ranks can run.
"""

from __future__ import annotations

from torch import fx

from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.verify import argument_checks, bucket_checks, cycle_checks, memory_checks
from megacompile.verify.hazard import Check, Hazard, HazardKind, View
from megacompile.views.python import table

__all__ = ["Hazard", "HazardKind", "hazards", "verify"]

_CHECKS: tuple[Check, ...] = (
    *argument_checks.CHECKS,
    *memory_checks.CHECKS,
    *bucket_checks.CHECKS,
)
_OF_ALL_GRAPHS = (
    argument_checks.saved_values,
    argument_checks.left_taken,
    bucket_checks.updates,
    cycle_checks.hazards,
)

_IN_FULL = 5  # hazards listed in the error; its table marks all


def verify(schedule: Schedule) -> None:
    """Prove that a schedule is safe.

    Raises:
        ScheduleError: it has hazards; the message lists them and marks them in its table.
    """
    found = hazards(schedule)
    if not found:
        return
    marks: dict[fx.Node, list[str]] = {}
    for hazard in found:
        for node in dict.fromkeys(hazard.nodes):
            marks.setdefault(node, []).append(f"{ops.label(node)}: {hazard.kind.value}")
    lines = [f"schedule {schedule.name!r} has {len(found)} hazard{'s' * (len(found) > 1)}:"]
    lines += [f"  {hazard.message}" for hazard in found[:_IN_FULL]]
    lines += [f"  ... and {len(found) - _IN_FULL} more"] if len(found) > _IN_FULL else []
    texts = {node: "; ".join(dict.fromkeys(text)) for node, text in marks.items()}
    raise ScheduleError("\n".join([*lines, "", table(schedule, texts)]))


def hazards(schedule: Schedule) -> list[Hazard]:
    """All hazards of a schedule."""
    views = View.all_of(schedule)
    found = [hazard for view in views for hazard in argument_checks.arguments(view)]
    if any(hazard.kind is HazardKind.ARGUMENTS for hazard in found):
        return found  # the checks below need complete arguments
    found += [hazard for view in views for check in _CHECKS for hazard in check(view)]
    return found + [hazard for check in _OF_ALL_GRAPHS for hazard in check(views)]
