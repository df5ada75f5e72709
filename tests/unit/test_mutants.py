"""`verify` against brute force: it reports every mutant that can go wrong, and none that cannot.

What can go wrong is decided without it: by walking all interleavings (`tests.interleavings`), and
on symbols (`tests.symbolic`). `python -m tests.prove --mutants` judges thousands.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.ir import ops
from megacompile.verify.proof import HazardKind, hazards
from tests import originals, prove
from tests.edits import awaited, wait, waits_for
from tests.interleavings import Interleavings
from tests.mutants import Harm
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
def test_a_dropped_edge_is_found_exactly_where_it_matters(spec: Spec) -> None:
    """Each edge in turn, but for those to tokens."""
    schedule = build(spec)
    needed = 0
    for graph in map(schedule.graphs.__getitem__, GRAPHS):
        assert Interleavings(graph).corrupted() == set()
        for node in graph.nodes:
            if lost := waits_for(node):
                after = node.kwargs
                wait(node, [n for n in awaited(node) if n not in lost])
                corrupted = Interleavings(graph).corrupted()
                assert bool(hazards(schedule)) == bool(corrupted), corrupted
                needed += bool(corrupted)
                node.kwargs = after
    assert needed > 0


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
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
        node = data.draw(st.sampled_from(movable), label="node")
        what = data.draw(st.sampled_from(["drop", "move", "slot"]), label="edit")
        if what == "drop":
            wait(node, [n for n in awaited(node) if n not in waits_for(node)])
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


def test_every_harmful_mutant_is_reported_and_nothing_else() -> None:
    """Mutants of graphs, and as many of updates and of what joins graphs."""
    schedules = originals.hand_made(20, seed=1, stages=4) + originals.lined(12, seed=1)
    counts = prove.prove_verify(170, 1, schedules, of_steps=130)
    assert counts.missed == [] and counts.false_alarms == 0, str(counts)
    assert counts.step is not None
    for each in (counts, counts.step):
        assert each.of(Harm.WRONG, reported=True) > 25
        assert each.of(Harm.NONE, reported=False) > 15, "it does not report everything"
    assert len(counts.step.edits) > 18, "of every kind"
    # Without one kind of check, some would be missed: the mutants need what `verify` proves.
    seen = [*counts.kinds, *counts.step.kinds]
    for blind in (
        {HazardKind.READ_TOO_EARLY, HazardKind.WRITTEN_TOO_EARLY, HazardKind.WRONG_TOKEN},
        {HazardKind.NOT_UPDATED, HazardKind.WRONG_UPDATE, HazardKind.STATE_LOST},
        {HazardKind.SLOT_OVERWRITTEN, HazardKind.SLOT_REFILLED, HazardKind.BEFORE_BEGIN},
        {HazardKind.FREED_TOO_EARLY, HazardKind.USE_AFTER_FREE, HazardKind.DOUBLE_FREE},
        {HazardKind.GRADIENTS_LOST, HazardKind.WRONG_GRADIENTS, HazardKind.GRADIENTS_NOT_READY},
    ):
        assert any(kinds <= blind for kinds in seen), blind
