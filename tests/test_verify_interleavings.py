"""`verify` against brute force: every interleaving of the streams is walked.

What goes wrong in one of them must be what is reported, and nothing else.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.verify.proof import HazardKind, hazards
from tests.interleavings import Interleavings
from tests.schedule_faults import waits_for
from tests.schedules import Spec, arguments, build, set_arguments

SMALL = [
    Spec(stages=3),
    Spec(stages=4, slots=3),
    Spec(stages=3, accumulate=True),
    Spec(stages=3, shared=True, accumulate=True),
    Spec(stages=4, reuse=True, slots=3),
    Spec(stages=3, changes=frozenset({1}), keep=frozenset({0}), random=frozenset({1})),
    Spec(stages=3, norms=True),
    Spec(stages=3, update=True),
    Spec(stages=3, update=True, norms=True),
    Spec(stages=3, update=True, accumulate=True, shared=True),
    Spec(stages=3, offload=frozenset({1, 2})),
    Spec(stages=3, offload=frozenset({0, 1}), keep=frozenset({1})),
    Spec(stages=3, offload=frozenset({1, 2}), changes=frozenset({1}), accumulate=True),
]


GRAPHS = ("forward", "backward")  # their own hazards; how graphs meet is another subject
BETWEEN = (HazardKind.READ_TOO_EARLY, HazardKind.WRITTEN_TOO_EARLY, HazardKind.WRONG_TOKEN)


@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_no_interleaving_corrupts_a_correct_schedule(spec: Spec) -> None:
    schedule = build(spec)
    for graph in map(schedule.graphs.__getitem__, GRAPHS):
        assert Interleavings(graph).corrupted() == set()


def edges(schedule: Schedule) -> list[tuple[str, int]]:
    """Every `after=` entry that is no token alone: its graph and the position of its node."""
    return [
        (name, i)
        for name in GRAPHS
        for i, n in enumerate(schedule.graphs[name].nodes)
        if waits_for(n)
    ]


def drop(node: fx.Node) -> None:
    """An op waits for tokens alone."""
    after: Any = node.kwargs.get("after", ())
    lost = waits_for(node)
    node.kwargs = {"after": tuple(n for n in after if n not in lost)}


@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_a_dropped_edge_is_found_exactly_where_it_matters(spec: Spec) -> None:
    needed = 0
    for name, i in edges(build(spec)):
        schedule = build(spec)
        graph = schedule.graphs[name]
        drop(list(graph.nodes)[i])
        corrupted = Interleavings(graph).corrupted()
        assert bool(hazards(schedule)) == bool(corrupted), corrupted
        needed += bool(corrupted)
    assert needed > 0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SMALL), st.data())
def test_random_edits_are_judged_as_brute_force_judges_them(
    spec: Spec, data: st.DataObject
) -> None:
    """Edges dropped, copies issued elsewhere, slots exchanged: several at once."""
    schedule = build(spec)
    name = data.draw(st.sampled_from(sorted(GRAPHS)))
    graph = schedule.graphs[name]
    for _ in range(data.draw(st.integers(1, 3))):
        copies = (ops.prefetch, ops.fetch_grad, ops.offload_grad, ops.fetch_state)
        others = (ops.offload_state, ops.offload_saved, ops.fetch_saved, ops.free, ops.defer_free)
        movable = ops.nodes_of(graph, *copies, *others)
        if not movable:
            continue
        node = data.draw(st.sampled_from(movable), label="node")
        what = data.draw(st.sampled_from(["drop", "move", "slot"]), label="edit")
        if what == "drop":
            drop(node)
        elif what == "move":
            goals = [
                n for n in graph.nodes if n.op != "placeholder" and n.target is not operator.getitem
            ]
            goal = data.draw(st.sampled_from(goals), label="goal")
            if goal is not node:
                goal.prepend(node)
        elif node.target is ops.prefetch:
            slot = data.draw(st.sampled_from(schedule.slots), label="slot")
            set_arguments(node, arguments(node)[0], slot)
    found = hazards(replace(schedule, reused=()) if name == "forward" else schedule)
    races = [h for h in found if h.graph == name and h.kind not in (HazardKind.LEAK, *BETWEEN)]
    corrupted = Interleavings(graph).corrupted()
    assert bool(races) == bool(corrupted), (corrupted, found)
