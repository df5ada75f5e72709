"""Ranks: each issues the same collectives in the same order, and fills the slot that it shares.

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
from typing import Any

from torch import fx

from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.collectives import Collectives, first_difference
from megacompile.ir.ops import Op, Value
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.values import kind_of, label
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


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


def _is_collective(op: Op) -> bool:
    return op.stream is Stream.COMM and op.issues


def _gathers_in_place(view: View) -> Iterator[Hazard]:
    """A gather takes this rank's part of its own bucket from where that is: from its own slot."""
    for node in view.that(lambda op: _is_collective(op) and op.fills_slot):
        bucket, slot, part = ops.arguments(node)
        if kind_of(part) is not Value.SHARD:
            continue  # reported as what it takes
        given: Any = ops.arguments(part)
        if _place(given[0], given[1]) != _place(bucket, slot):
            message = (
                f"{label(node)} takes the part that {label(part)} fetched: bucket "
                f"{given[0].label} in slot {given[1].index}, but it fills slot {slot.index} with "
                f"bucket {bucket.label}; give it a prefetch of that"
            )
            yield view.hazard(HazardKind.WRONG_WEIGHTS, node, part, message)


def _place(bucket: Bucket, slot: Slot) -> tuple[int, int]:
    return bucket.key, slot.index


CHECKS: tuple[Check, ...] = (_gathers_in_place,)
