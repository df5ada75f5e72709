"""`megacompile.verify` over ranks: schedules that the passes make, and mutants of these."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

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
from tests.capturing import Net, capture

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reuse": True, "accumulate": True},
    {"lookahead": 1, "slots": 2},
    {"update": True},
    {"norms": True, "device_update": 0.5},
    {"resident": frozenset({1})},
]


@functools.cache
def captured(ranks: int) -> Any:
    return capture(Net(Net.chain), torch.ones(2, 4), ranks=ranks)


def built(rank: int = 0, *, ranks: int = 2, **options: Any) -> Schedule:
    schedule: Schedule = captured(ranks).build(rank=rank, **options)
    return schedule


def collectives(graph: fx.Graph) -> list[fx.Node]:
    return ops.nodes_that(graph, lambda op: op.stream is Stream.COMM)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_the_passes_make_is_right(options: dict[str, Any], ranks: int) -> None:
    schedules = [built(rank, ranks=ranks, **options) for rank in range(ranks)]
    assert all(len(collectives(graph)) > 2 for graph in _two(schedules[0]))
    for schedule in schedules:
        assert hazards(schedule) == []
    verify_ranks(schedules)


def _two(schedule: Schedule) -> list[fx.Graph]:
    assert schedule.backward is not None
    return [schedule.forward, schedule.backward]


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_swapped_collectives_are_reported(name: str) -> None:
    """Every two neighbours, in one of three ranks; that rank alone may be right."""
    count = len(collectives(built().graphs[name]))
    right_alone = 0
    for k in range(count - 1):
        mutant = built(1, ranks=3)
        first, second = collectives(mutant.graphs[name])[k : k + 2]
        at = first.next
        second.append(first)
        moved = {n for n in mutant.graphs[name].nodes if first in n.all_input_nodes}
        right_alone += not hazards(mutant)
        (found,) = hazards_of_ranks([built(0, ranks=3), mutant, built(2, ranks=3)])
        assert found.kind is HazardKind.RANKS_DIFFER and found.graph == name, (at, moved)
        assert f"collective {k + 1} is" in str(found) and "in rank 1" in str(found)
    assert right_alone > 0, "only several ranks show it"


class Tanh(nn.Module):
    """A layer whose backward, without a gradient of its input, needs no weights, as its recompute
    does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))


def test_ranks_may_keep_other_stages() -> None:
    model = nn.Sequential(Tanh(), Tanh(), Tanh())
    kept = capture(model, torch.ones(2, 4), ranks=2)
    activations = ("keep", "recompute", "selective", "offload")
    schedules = [kept.build(rank=i % 2, activations=how) for i, how in enumerate(activations)]
    assert len({schedule.plan.keep for schedule in schedules}) > 1
    for schedule in schedules:
        assert hazards(schedule) == []
    verify_ranks(schedules)


def test_another_plan_is_reported() -> None:
    with pytest.raises(ScheduleError) as raised:
        verify_ranks([built(0), built(1, lookahead=1)])
    assert "collective 3 is 2ALL_GATHER@2 of 'layers.1'" in str(raised.value)
    assert "give all ranks one plan" in str(raised.value)


class Gated(nn.Module):
    """Two parameters of one size, of which one is frozen."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.get_submodule(frozen).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.gate(x)) * self.up(x)
        return result


def test_gradients_of_other_parameters_are_reported() -> None:
    """They take as many bytes, and would be averaged with one another."""
    models = [nn.Sequential(Gated(frozen), Gated(frozen)) for frozen in ("gate", "up")]
    each = [capture(model, torch.ones(2, 4), ranks=2) for model in models]
    schedules = [captured.build(rank=rank) for rank, captured in enumerate(each)]
    (found,) = hazards_of_ranks(schedules)
    assert found.kind is HazardKind.RANKS_DIFFER and found.graph == "backward"
    assert "up.weight) in rank 0, but" in str(found)
    verify_ranks([schedules[0], each[0].build(rank=1)])


def test_one_that_does_not_train_is_reported() -> None:
    found = hazards_of_ranks([built(0), _without_backward()])
    assert [hazard.graph for hazard in found if hazard.kind is HazardKind.RANKS_DIFFER]


def _without_backward() -> Schedule:
    with torch.no_grad():
        other = capture(Net(Net.chain), torch.ones(2, 4), ranks=2)
    return other.build(rank=1)


# Mutants of one rank.


def lose_the_copy(schedule: Schedule, gather: fx.Node) -> None:
    bucket, slot, _ = ops.arguments(gather)
    set_args(gather, (bucket, slot, None))


def take_another_part(schedule: Schedule, gather: fx.Node) -> None:
    bucket, slot, part = ops.arguments(gather)
    others = ops.nodes_of(gather.graph, ops.prefetch_shard)
    set_args(gather, (bucket, slot, next(n for n in others if n is not part)))


def fill_another_slot(schedule: Schedule, gather: fx.Node) -> None:
    bucket, slot, part = ops.arguments(gather)
    other = next(s for s in schedule.slots if s.index != slot.index)
    set_args(gather, (bucket, Slot(other.index, other.size_bytes), part))


def come_before_the_copy(schedule: Schedule, gather: fx.Node) -> None:
    part = ops.arguments(gather)[2]
    part.prepend(gather)


MUTANTS: list[tuple[Callable[[Schedule, fx.Node], None], HazardKind]] = [
    (lose_the_copy, HazardKind.ARGUMENTS),
    (take_another_part, HazardKind.WRONG_WEIGHTS),
    (fill_another_slot, HazardKind.WRONG_WEIGHTS),
    (come_before_the_copy, HazardKind.USE_BEFORE_MADE),
]


@pytest.mark.parametrize(("mutate", "kind"), MUTANTS)
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_gather_without_its_part_is_reported(mutate: Any, kind: HazardKind, name: str) -> None:
    count = len(ops.nodes_of(built().graphs[name], ops.all_gather))
    for k in range(count):
        mutant = built()
        gather = ops.nodes_of(mutant.graphs[name], ops.all_gather)[k]
        if mutate is take_another_part and count == 1:
            continue
        mutate(mutant, gather)
        assert kind in {hazard.kind for hazard in hazards(mutant)}, (k, hazards(mutant))


@pytest.mark.parametrize("options", [{}, {"lookahead": 1, "slots": 2}, {"reuse": True}], ids=str)
def test_a_slot_that_is_refilled_before_its_readers_are_done_is_reported(options: Any) -> None:
    """Every edge that a copy of a part waits for: what it overwrites may still be read."""
    tried = 0
    for name, k in itertools.product(("forward", "backward"), range(12)):
        mutant = built(**options)
        copies = ops.nodes_of(mutant.graphs[name], ops.prefetch_shard)
        readers = (ops.forward, ops.recompute, ops.backward)
        if k >= len(copies):
            continue
        after: Any = copies[k].kwargs.get("after", ())
        kept = tuple(n for n in after if producer(n).target not in readers)
        if kept == tuple(after):
            continue
        copies[k].kwargs = {"after": kept}
        tried += 1
        kinds = {hazard.kind for hazard in hazards(mutant)}
        assert HazardKind.SLOT_OVERWRITTEN in kinds, (name, k, after)
    assert tried > 2


def test_a_gather_that_comes_after_its_reader_is_reported() -> None:
    mutant = built()
    gather = ops.nodes_of(mutant.forward, ops.all_gather)[-1]
    reader = next(iter(gather.users))
    reader.append(gather)
    assert HazardKind.USE_BEFORE_MADE in {hazard.kind for hazard in hazards(mutant)}


def test_gradients_that_are_freed_while_ranks_average_them_are_reported() -> None:
    mutant = built()
    assert mutant.backward is not None
    frees = ops.nodes_of(mutant.backward, ops.free, ops.defer_free)
    means = ops.nodes_of(mutant.backward, ops.reduce_scatter)
    after: dict[fx.Node, Any] = {node: node.kwargs.get("after", ()) for node in frees}
    waiting = [node for node in frees if set(means) & set(after[node])]
    assert waiting
    for node in waiting:
        node.kwargs = {}
    assert HazardKind.FREED_TOO_EARLY in {hazard.kind for hazard in hazards(mutant)}


# Replicas.

REPLICATED: list[dict[str, Any]] = [
    {},
    {"accumulate": True, "delays": True},
    {"reuse": True, "accumulate": True, "defers": True, "delays": True},
    {"update": True, "slots": 5, "delays": True},
    {"update": True, "slots": 5, "accumulate": True, "delays": True, "norms": True},
    {"norms": True, "device_update": 0.5, "delays": True},
    {"resident": frozenset({1}), "accumulate": True},
    {"resident": frozenset({1}), "update": True, "norms": True},
]


@functools.cache
def replicated() -> Any:
    return capture(Net(Net.chain), torch.ones(2, 4), ranks=2, replicas=2)


def doubled(rank: int = 0, **options: Any) -> Schedule:
    schedule: Schedule = replicated().build(rank=rank, **options)
    return schedule


@pytest.mark.parametrize("options", REPLICATED, ids=str)
def test_what_replicas_run_is_right(options: dict[str, Any]) -> None:
    schedules = [doubled(rank, **options) for rank in range(2)]
    for schedule in schedules:
        assert hazards(schedule) == []
        assert schedule.backward is not None
        sums = ops.nodes_of(schedule.backward, ops.all_reduce)
        parts = ops.nodes_of(schedule.backward, ops.reduce_scatter)
        assert len(sums) == (0 if options.get("defers") else len(parts)) and len(parts) == 5
    verify_ranks(schedules)


@pytest.mark.parametrize("options", [o for o in REPLICATED if not o.get("defers")], ids=str)
def test_gradients_without_their_sum_over_replicas_are_reported(options: dict[str, Any]) -> None:
    """Each of them in turn: the sum is not made, or something is added behind it."""
    for k, early in itertools.product(range(5), (False, True)):
        mutant = doubled(**options)
        assert mutant.backward is not None
        mean = ops.nodes_of(mutant.backward, ops.all_reduce)[k]
        bucket, gradients = ops.arguments(mean)
        if early and gradients.target is not ops.add_grad:
            continue
        frees = [node for node in mean.users if node.target in (ops.free, ops.defer_free)]
        for node in frees:
            mutant.backward.erase_node(node)
        mean.replace_all_uses_with(gradients)
        mutant.backward.erase_node(mean)
        if early:
            part = ops.arguments(gradients)[2]
            with mutant.backward.inserting_after(part):
                mean = ops.call(mutant.backward, ops.all_reduce, bucket, part, name="early")
            set_args(gradients, (*ops.arguments(gradients)[:2], mean))
        found = [h for h in hazards(mutant) if "not summed over its 2 replicas" in str(h)]
        assert found and found[0].kind is HazardKind.WRONG_GRADIENTS, (k, early)


def test_a_backward_that_leaves_the_sum_to_a_later_one_only_keeps() -> None:
    """It neither measures nor updates."""
    for options in ({"norms": True}, {"update": True, "slots": 5}):
        made = doubled(**options, delays=True)
        mutant = replace(made, defers=True)
        assert mutant.backward is not None and not hazards(mutant)
        for mean in ops.nodes_of(mutant.backward, ops.all_reduce):
            for node in [n for n in mean.users if n.target in (ops.free, ops.defer_free)]:
                mutant.backward.erase_node(node)
            mean.replace_all_uses_with(ops.arguments(mean)[1])
            mutant.backward.erase_node(mean)
        found = [h for h in hazards(mutant) if "not summed over its 2 replicas" in str(h)]
        labels = {hazard.label.lstrip("01234") for hazard in found}
        assert labels == {"NORM_GRAD" if "norms" in options else "UPDATE"}


def test_a_rank_that_leaves_the_sum_to_a_later_backward_is_reported() -> None:
    with pytest.raises(ScheduleError, match=r"collective . is 4ALL_REDUCE of 'head' .* in rank 0"):
        verify_ranks([doubled(0), doubled(1, defers=True)])
