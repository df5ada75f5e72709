"""Drafts are the schedules of their choices, whatever was drafted before."""

from __future__ import annotations

import pytest

from megacompile.ir.schedule import Schedule
from megacompile.plan.choice import Choice
from tests.test_planner import problem

CHOICES = (
    Choice(0),
    Choice(5, device_update=0.4),
    Choice(4, halves=True),
    Choice(3, saved_on_host=4),
    Choice(3, saved_on_host=4, more_slots=2),
    Choice(0, offload=6),
    Choice(0, offload=6, rerun=3),
    Choice(2, tiles=4),
)


def says(schedule: Schedule) -> list[object]:
    """Its plan, and everything that its graphs say, with nodes by their names."""
    nodes = [node for graph in schedule.graphs.values() for node in graph.nodes]
    return [schedule.plan, *((n.op, n.name, str(n.args), str(n.kwargs)) for n in nodes)]


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_draft_is_the_schedule_of_its_choice(in_backward: bool) -> None:
    drafts = problem(2**36, in_backward=in_backward).drafts
    before = says(drafts.graphs)
    for choice in CHOICES:
        drafts.waiting(choice)
        made = drafts.pipeline.planned(drafts.graphs, drafts.variant, choice)
        for _ in range(2):  # the second of what is kept
            assert says(drafts.of(choice)) == says(made), choice
    assert says(drafts.graphs) == before


def test_what_waits_is_the_same_wherever_buckets_live() -> None:
    drafts = problem(2**36).drafts
    resident = frozenset(bucket.key for bucket in drafts.graphs.buckets[:4])
    waiting = drafts.waiting(Choice(3, saved_on_host=4))
    assert waiting and waiting == drafts.waiting(Choice(3, resident, saved_on_host=4))
    assert not drafts.waiting(Choice(3))
