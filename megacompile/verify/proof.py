"""Proof that a schedule is free of races, leaks and mix-ups; every schedule passes before it runs.

What must hold, given [Note: happens-before] in `megacompile.ir.edges`:

- ops are given what they read, and the backward what the forward read: see `verify.computes`;
- what flows through the graphs reaches those that it is for: see `verify.flow`;
- memory is not reused while it is read, and ranks gather a bucket where its part is: see
  `verify.memory`;
- gradients reach the host once and whole: see `verify.gradients`;
- `optimizer.step()` updates what got gradients, once: see `verify.updates`;
- what waits on the host or on a disk is found there again: see `verify.storage`;
- one graph waits for what another does to a bucket: see `verify.cycle`.

The checks read the graphs alone: no device, no data.

[Note: collectives of ranks] A collective is done when all ranks have issued it, and those of one
rank are done in the order in which it issues them. So ranks must issue the same sequence: else one
waits for what another never issues, or values meet that do not belong together. A rank issues its
collectives in program order in every interleaving: they share a stream that is in order, and the
runtime lets none overtake one that is put off (`Streams._must_wait`). The sequence of a rank is
therefore what its graph says.

Then nothing waits for ever. Of each rank, program order is an order in which all of its ops can
run, because edges that point backward are hazards. Ranks of the same sequence meet at each
collective in turn: their program orders joined there are an order in which all ops of all ranks can
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.collectives import Collectives, first_difference
from megacompile.ir.schedule import Schedule
from megacompile.verify import computes, cycle, flow, gradients, memory, storage, updates
from megacompile.verify.hazard import Check, Hazard, HazardKind, View
from megacompile.views.table import table

__all__ = ["Hazard", "HazardKind", "hazards", "hazards_of_ranks", "verify", "verify_ranks"]

_CHECKS: tuple[Check, ...] = (
    *computes.CHECKS,
    *memory.CHECKS,
    *storage.CHECKS,
    *gradients.CHECKS,
    *flow.CHECKS,
    *updates.CHECKS,
)
_JOINED = (flow.saved_values, flow.left_taken, updates.updated_once, cycle.hazards)

_IN_FULL = 5  # hazards that the error spells out; the table marks them all


def verify(schedule: Schedule) -> None:
    """Prove a schedule safe.

    Raises:
        ScheduleError: it has hazards; the message lists them and marks them in its table.
    """
    found = hazards(schedule)
    if not found:
        return
    marks: dict[fx.Node, list[str]] = {}
    for hazard in found:
        for node in hazard.nodes:
            marks.setdefault(node, []).append(f"{ops.label(node)}: {hazard.kind.value}")
    lines = [f"schedule {schedule.name!r} has {len(found)} hazard{'s' * (len(found) > 1)}:"]
    lines += [f"  {hazard}" for hazard in found[:_IN_FULL]]
    lines += [f"  ... and {len(found) - _IN_FULL} more"] if len(found) > _IN_FULL else []
    texts = {node: "; ".join(dict.fromkeys(text)) for node, text in marks.items()}
    raise ScheduleError("\n".join([*lines, "", table(schedule, texts)]))


def hazards(schedule: Schedule) -> list[Hazard]:
    """Everything that is wrong with a schedule; [] if nothing."""
    views = View.all_of(schedule)
    found = [hazard for view in views for hazard in computes.incomplete(view)]
    if found:  # the checks below rely on what is missing
        return found
    found = [hazard for view in views for check in _CHECKS for hazard in check(view)]
    return found + [hazard for joined in _JOINED for hazard in joined(views)]


# Ranks.


def verify_ranks(schedules: Sequence[Schedule]) -> None:
    """Prove that ranks can run their schedules together; each is proved alone elsewhere.

    Args:
        schedules: of rank 0, 1, ...: what they run at the same time.

    Raises:
        ScheduleError: their collectives differ.
    """
    found = hazards_of_ranks(schedules)
    if found:
        lines = [f"{len(schedules)} ranks run schedule {schedules[0].name!r} with hazards:"]
        raise ScheduleError("\n".join([*lines, *(f"  {hazard}" for hazard in found)]))


def hazards_of_ranks(schedules: Sequence[Schedule]) -> list[Hazard]:
    """Hazards between ranks: the first difference of each rank from rank 0, by graph."""
    first, *others = schedules
    return [
        hazard
        for rank, other in enumerate(others, 1)
        for name in dict.fromkeys((*first.graphs, *other.graphs))
        for hazard in _differences(name, first, other, rank)
    ]


def _differences(name: str, first: Schedule, other: Schedule, rank: int) -> Iterator[Hazard]:
    mine, theirs = (_sequence(schedule, name) for schedule in (first, other))
    texts = [
        Collectives.of(s.graphs[name], name, s.name).ops if name in s.graphs else ()
        for s in (first, other)
    ]
    difference = first_difference(*texts)
    if difference is None:
        return
    i, here, there = difference
    nodes = tuple(nodes[i] for nodes in (mine, theirs) if i < len(nodes))
    labels = [ops.label(nodes[i]) if i < len(nodes) else "" for nodes in (mine, theirs)]
    message = (
        f"{name}: collective {i + 1} is {here} in rank 0, but {there} in rank {rank}; each rank "
        "would wait for what the other does not issue; give all ranks one plan"
    )
    yield Hazard(HazardKind.RANKS_DIFFER, name, labels[0], labels[1], message, nodes)


def _sequence(schedule: Schedule, name: str) -> list[fx.Node]:
    if name not in schedule.graphs:
        return []
    return ops.nodes_that(schedule.graphs[name], ops.alike)
