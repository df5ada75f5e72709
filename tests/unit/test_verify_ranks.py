"""`megacompile.verify` over ranks and over mutants.

Ranks: schedules that the passes make of stubs, and mutants of them. Of one rank: it reports every
mutant that can go wrong, and none that cannot. What can go wrong is decided without it, on symbols
(`tests.symbolic_cycle`). `python -m tests.prove --mutants` judges thousands.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.verify.proof import HazardKind, hazards, hazards_of_ranks, verify_ranks
from tests import originals, prove
from tests.mutants import Harm
from tests.planned import planned

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two slots": {"lookahead": 1, "slots": 2, "reuse": True, "accumulate": True},
    "resident": {"resident": frozenset({1}), "update": True, "slots": 5},
}
REPLICATED: dict[str, dict[str, Any]] = {  # each has another taker of the sum
    "accumulate": {"accumulate": True},
    "update": {"update": True, "slots": 5},
    "norms": {"inductor": True, "device_update": 0.5, "accumulate": True},
    "resident": {"resident": frozenset({1})},
}
DEFERRED = {"reuse": True, "accumulate": True, "defers": True}


@functools.cache
def _built(options: tuple[tuple[str, Any], ...]) -> Schedule:
    return planned("0F 1F 2F 3F 4F", **dict(options))


def built(*, ranks: int = 2, **options: Any) -> Schedule:
    """A schedule of five stages, to be spoilt."""
    options = {"lookahead": 2, "slots": 3, "ranks": ranks, **options}
    return _built(tuple(options.items())).copy()


def collectives(graph: fx.Graph) -> list[fx.Node]:
    return ops.nodes_that(graph, lambda op: op.stream is Stream.COMM)


# What the passes make.


@pytest.mark.parametrize("options", [*OPTIONS.values(), *REPLICATED.values(), DEFERRED], ids=str)
def test_what_the_passes_make_is_right(options: dict[str, Any]) -> None:
    for kind in ({"ranks": 3}, {"replicas": 2}):
        schedules = [built(**kind, rank=rank, **options) for rank in range(kind.get("ranks", 2))]
        for schedule in schedules:
            assert hazards(schedule) == []
            sums = ops.nodes_of(schedule.graphs["backward"], ops.all_reduce)
            assert len(sums) == (5 if "replicas" in kind and not options.get("defers") else 0)
        verify_ranks(schedules)
    keeps = ("keep", "recompute", "selective", "offload")  # ranks may keep other stages
    verify_ranks([built(rank=i % 2, activations=how) for i, how in enumerate(keeps)])


# Between ranks.


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_swapped_collectives_are_reported(name: str) -> None:
    """Every two neighbours, in one of three ranks; that rank alone may be right."""
    right_alone = 0
    for k in range(len(collectives(built().graphs[name])) - 1):
        mutant = built(rank=1, ranks=3)
        first, second = collectives(mutant.graphs[name])[k : k + 2]
        second.append(first)
        right_alone += not hazards(mutant)
        (found,) = hazards_of_ranks([built(ranks=3), mutant, built(rank=2, ranks=3)])
        assert found.kind is HazardKind.RANKS_DIFFER and found.graph == name
        assert f"collective {k + 1} " in str(found) and "rank 1" in str(found)
    assert right_alone > 0, "only several ranks show it"


OTHER: dict[str, tuple[Schedule, Schedule]] = {
    "another lookahead": (built(), built(rank=1, lookahead=1)),
    "no backward": (built(), replace(built(rank=1), backward=None)),
    "a later backward sums": (built(replicas=2), built(replicas=2, rank=1, **DEFERRED)),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_another_rank_runs_is_reported(name: str) -> None:
    for several in (OTHER[name], OTHER[name][::-1]):
        with pytest.raises(ScheduleError, match="collective"):
            verify_ranks(several)


# Replicas.


def without_sum(graph: fx.Graph, mean: fx.Node) -> fx.Node:
    """Remove a sum over replicas from a graph; returns its input."""
    gradients: fx.Node = ops.arguments(mean)[1]
    for node in [n for n in mean.users if n.target in (ops.free, ops.defer_free)]:
        graph.erase_node(node)
    mean.replace_all_uses_with(gradients)
    graph.erase_node(mean)
    return gradients


def unsummed(schedule: Schedule) -> list[Any]:
    return [h for h in hazards(schedule) if "the result of their all_reduce" in str(h)]


@pytest.mark.parametrize("name", REPLICATED)
def test_gradients_without_their_sum_over_replicas_are_reported(name: str) -> None:
    """A missing sum over replicas, and one before the gradients are added."""
    for k, early in itertools.product(range(5), (False, True)):
        mutant = built(replicas=2, **REPLICATED[name])
        graph = mutant.graphs["backward"]
        mean = ops.nodes_of(graph, ops.all_reduce)[k]
        bucket, gradients = ops.arguments(mean)
        if early and gradients.target is not ops.add_grad:
            continue
        without_sum(graph, mean)
        if early:
            *others, part = ops.arguments(gradients)
            with graph.inserting_after(part):
                mean = ops.call(graph, ops.all_reduce, bucket, part, name="early")
            gradients.args = (*others, mean)
        found = unsummed(mutant)
        assert found and found[0].kind is HazardKind.WRONG_ARGUMENT, k


@pytest.mark.parametrize("options", [{}, {"update": True, "slots": 5}], ids=str)
def test_a_backward_that_leaves_the_sum_to_a_later_one_only_keeps(options: dict[str, Any]) -> None:
    """It neither measures nor updates."""
    mutant = replace(built(replicas=2, **options), defers=True)
    graph = mutant.graphs["backward"]
    assert not hazards(mutant)
    for mean in ops.nodes_of(graph, ops.all_reduce):
        without_sum(graph, mean)
    labels = {hazard.label.lstrip("01234") for hazard in unsummed(mutant)}
    assert labels == {"NORM_GRAD", *(["UPDATE"] if options else [])}


def test_every_harmful_mutant_is_reported_and_nothing_else() -> None:
    """Mutants of graphs, of updates and of what joins graphs."""
    counts = prove.prove_verify(300, 1, originals.lined(32, seed=1))
    assert counts.missed == [] and counts.false_alarms == 0, str(counts)
    assert counts.of(Harm.WRONG, reported=True) > 50
    assert counts.of(Harm.NONE, reported=False) > 30, "it does not report everything"
    assert len({name for name, _ in counts.edits}) > 25, "of every kind"
    # Without one kind of check, some would be missed: the mutants need what `verify` proves.
    for blind in (
        {HazardKind.RACE, HazardKind.HANDED_ON},
        {HazardKind.WRONG_UPDATE},
        {HazardKind.SLOT_REFILLED},
        {HazardKind.FREED_TOO_EARLY, HazardKind.USE_AFTER_FREE, HazardKind.WRONG_FREE},
        {HazardKind.LOST, HazardKind.WRONG_ARGUMENT, HazardKind.USE_BEFORE_MADE},
    ):
        assert any(kinds <= blind for kinds in counts.kinds), blind
