"""`megacompile.verify` over ranks: schedules that the passes make of stubs, and mutants of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.buckets import Slot
from megacompile.ir.nodes import set_args
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.values import producer
from megacompile.verify.hazard import HazardKind
from megacompile.verify.proof import hazards
from megacompile.verify.ranks import hazards_of_ranks, verify_ranks
from tests.actions import parse
from tests.capturing import after_templates

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reuse": {"reuse": True, "accumulate": True},
    "two slots": {"lookahead": 1, "slots": 2},
    "update": {"update": True, "slots": 4},
    "norms": {"norms": True, "device_update": 0.5},
    "resident": {"resident": frozenset({1})},
}
REPLICATED: dict[str, dict[str, Any]] = {  # each leaves out no kind of taker of the sum
    "plain": {},
    "accumulate": {"accumulate": True, "delays": True},
    "update": {"update": True, "slots": 5, "delays": True},
    "update, accumulate": {"update": True, "slots": 5, "accumulate": True, "norms": True},
    "norms": {"norms": True, "device_update": 0.5, "delays": True},
    "resident": {"resident": frozenset({1}), "accumulate": True, "norms": True},
}
DEFERRED = {"reuse": True, "accumulate": True, "defers": True, "delays": True}


@functools.cache
def _built(ranks: int, replicas: int, options: tuple[tuple[str, Any], ...]) -> Schedule:
    schedule = parse("0F 1F 2F 3F 4F", ranks=ranks, replicas=replicas)
    for function in after_templates(**dict(options)).values():
        schedule = function(schedule)
    return schedule


def built(*, ranks: int = 2, replicas: int = 1, **options: Any) -> Schedule:
    """A schedule of five stages, to be spoilt."""
    return _built(ranks, replicas, tuple(options.items())).copy()


def backward_of(schedule: Schedule) -> fx.Graph:
    assert schedule.backward is not None
    return schedule.backward


def kinds(schedule: Schedule) -> set[HazardKind]:
    return {hazard.kind for hazard in hazards(schedule)}


def collectives(graph: fx.Graph) -> list[fx.Node]:
    return ops.nodes_that(graph, lambda op: op.stream is Stream.COMM)


# What the passes make.


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_passes_make_is_right(name: str, ranks: int) -> None:
    schedules = [built(ranks=ranks, rank=i, **OPTIONS[name]) for i in range(ranks)]
    for schedule in schedules:
        assert hazards(schedule) == []
        assert len(collectives(backward_of(schedule))) >= 5
    verify_ranks(schedules)


@pytest.mark.parametrize("options", [*REPLICATED.values(), DEFERRED], ids=str)
def test_what_replicas_run_is_right(options: dict[str, Any]) -> None:
    schedules = [built(replicas=2, rank=rank, **options) for rank in range(2)]
    for schedule in schedules:
        assert hazards(schedule) == []
        sums = ops.nodes_of(backward_of(schedule), ops.all_reduce)
        assert len(sums) == (0 if options.get("defers") else 5)
    verify_ranks(schedules)


def test_ranks_may_keep_other_stages() -> None:
    activations = ("keep", "recompute", "selective", "offload")
    schedules = [built(rank=i % 2, activations=how) for i, how in enumerate(activations)]
    assert len({schedule.plan.keep for schedule in schedules}) > 1
    verify_ranks(schedules)


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
        assert f"collective {k + 1} is" in str(found) and "in rank 1" in str(found)
    assert right_alone > 0, "only several ranks show it"


OTHER: dict[str, tuple[Schedule, Schedule]] = {
    "another lookahead": (built(), built(rank=1, lookahead=1)),
    "no backward": (built(), replace(built(rank=1), backward=None)),
    "a later backward sums": (built(replicas=2), built(replicas=2, rank=1, **DEFERRED)),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_another_rank_runs_is_reported(name: str) -> None:
    with pytest.raises(ScheduleError, match="collective . is .* in rank 0, but "):
        verify_ranks(OTHER[name])
    with pytest.raises(ScheduleError, match="collective"):
        verify_ranks(OTHER[name][::-1])


# Mutants of one rank.


def lose_the_copy(gather: fx.Node) -> None:
    bucket, slot, _ = ops.arguments(gather)
    set_args(gather, (bucket, slot, None))


def take_another_part(gather: fx.Node) -> None:
    bucket, slot, part = ops.arguments(gather)
    others = ops.nodes_of(gather.graph, ops.prefetch_shard)
    set_args(gather, (bucket, slot, next(n for n in others if n is not part)))


def fill_another_slot(gather: fx.Node) -> None:
    bucket, slot, part = ops.arguments(gather)
    set_args(gather, (bucket, Slot((slot.index + 1) % 3, slot.size_bytes), part))


def come_before_the_copy(gather: fx.Node) -> None:
    ops.arguments(gather)[2].prepend(gather)


def come_after_a_reader(gather: fx.Node) -> None:
    next(iter(gather.users)).append(gather)


OF_A_GATHER: list[tuple[Callable[[fx.Node], None], HazardKind]] = [
    (lose_the_copy, HazardKind.ARGUMENTS),
    (take_another_part, HazardKind.WRONG_WEIGHTS),
    (fill_another_slot, HazardKind.WRONG_WEIGHTS),
    (come_before_the_copy, HazardKind.USE_BEFORE_MADE),
    (come_after_a_reader, HazardKind.USE_BEFORE_MADE),
]


@pytest.mark.parametrize(("mutate", "kind"), OF_A_GATHER)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_spoilt_gather_is_reported(
    mutate: Callable[[fx.Node], None], kind: HazardKind, name: str
) -> None:
    for k in range(len(ops.nodes_of(built().graphs[name], ops.all_gather))):
        mutant = built()
        mutate(ops.nodes_of(mutant.graphs[name], ops.all_gather)[k])
        assert kind in kinds(mutant), (k, hazards(mutant))


@pytest.mark.parametrize("name", ["plain", "two slots", "reuse"])
def test_a_slot_that_is_refilled_before_its_readers_are_done_is_reported(name: str) -> None:
    """Every edge that a copy waits for: what it overwrites may still be read."""
    readers = (ops.forward, ops.recompute, ops.backward)
    tried = 0
    for graph in ("forward", "backward"):
        copies = built(**OPTIONS[name]).graphs[graph]
        for k in range(len(ops.nodes_of(copies, ops.prefetch_shard))):
            mutant = built(**OPTIONS[name])
            copy = ops.nodes_of(mutant.graphs[graph], ops.prefetch_shard)[k]
            after: Any = copy.kwargs.get("after", ())
            kept = tuple(n for n in after if producer(n).target not in readers)
            if kept != tuple(after):
                copy.kwargs = {"after": kept}
                tried += 1
                assert HazardKind.SLOT_OVERWRITTEN in kinds(mutant), (graph, k, after)
    assert tried > 2


def test_gradients_that_are_freed_while_ranks_average_them_are_reported() -> None:
    count = len(ops.nodes_of(backward_of(built()), ops.reduce_scatter))
    for k in range(count):
        mutant = built()
        graph = backward_of(mutant)
        mean = ops.nodes_of(graph, ops.reduce_scatter)[k]
        waiting = [
            node
            for node in ops.nodes_of(graph, ops.free, ops.defer_free)
            if mean in list(node.kwargs.get("after", ()))  # type: ignore[arg-type]
        ]
        assert waiting
        for node in waiting:
            node.kwargs = {}
        assert HazardKind.FREED_TOO_EARLY in kinds(mutant)


# Replicas.


def without_sum(graph: fx.Graph, mean: fx.Node) -> fx.Node:
    """Take a sum over replicas out of a graph; gives what it was of."""
    gradients: fx.Node = ops.arguments(mean)[1]
    for node in [n for n in mean.users if n.target in (ops.free, ops.defer_free)]:
        graph.erase_node(node)
    mean.replace_all_uses_with(gradients)
    graph.erase_node(mean)
    return gradients


def unsummed(schedule: Schedule) -> list[Any]:
    return [h for h in hazards(schedule) if "not summed over its 2 replicas" in str(h)]


@pytest.mark.parametrize("early", [False, True], ids=["left out", "before what is added"])
@pytest.mark.parametrize("name", REPLICATED)
def test_gradients_without_their_sum_over_replicas_are_reported(name: str, early: bool) -> None:
    for k in range(5):
        mutant = built(replicas=2, **REPLICATED[name])
        graph = backward_of(mutant)
        mean = ops.nodes_of(graph, ops.all_reduce)[k]
        bucket, gradients = ops.arguments(mean)
        if early and gradients.target is not ops.add_grad:
            continue
        without_sum(graph, mean)
        if early:
            *others, part = ops.arguments(gradients)
            with graph.inserting_after(part):
                mean = ops.call(graph, ops.all_reduce, bucket, part, name="early")
            set_args(gradients, (*others, mean))
        found = unsummed(mutant)
        assert found and found[0].kind is HazardKind.WRONG_GRADIENTS, k


@pytest.mark.parametrize(
    ("options", "label"),
    [({"norms": True}, "NORM_GRAD"), ({"update": True, "slots": 5}, "UPDATE")],
)
def test_a_backward_that_leaves_the_sum_to_a_later_one_only_keeps(
    options: dict[str, Any], label: str
) -> None:
    """It neither measures nor updates."""
    mutant = replace(built(replicas=2, **options, delays=True), defers=True)
    graph = backward_of(mutant)
    assert not hazards(mutant)
    for mean in ops.nodes_of(graph, ops.all_reduce):
        without_sum(graph, mean)
    assert {hazard.label.lstrip("01234") for hazard in unsummed(mutant)} == {label}
