"""Training over simulated ranks on a few cases, and that these see what they are there to see.

`python -m tests.prove --ranks N` does more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import producer
from megacompile.passes.schedule.tokens import insert_tokens
from megacompile.plan import compiler, pipeline
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.collectives import CollectiveOps
from tests import prove
from tests.draws import drawn
from tests.interconnect import CollectiveError, Interconnect, SimulatedRanks
from tests.nets import Choice, Net
from tests.rank_subject import RankSubject, Shared
from tests.subject import Counts, InOrder

NET = Net(
    kinds=("linear", "block", "dropout", "batch norm", "linear"),
    hidden=13,
    calls=(0, 1, 2, 3, 4, 1),
    skips=((3, 0),),
    tied=((4, 0),),
    input_grad=True,
    outputs=(2,),
    in_loss=True,
)
SEEDS = range(6)


@pytest.mark.parametrize("cases", drawn([12], [60]))
def test_random_cases_equal_the_plain_ranks(cases: int) -> None:
    counts = prove.prove_ranks(cases, seed=2, interleavings=3)
    assert counts.found == []
    assert counts.cases >= cases and counts.mismatches == 0
    assert counts.collectives > 10 * cases and len(counts.of_ranks) > 1


@pytest.mark.parametrize(
    ("ranks", "choice"),
    [
        (2, Choice(optimizer="adamw", lookahead=3, keep=0b101)),
        pytest.param(3, Choice(optimizer="sgd", in_backward=True), marks=pytest.mark.thorough),
        (4, Choice(resident=1, more_slots=1)),
    ],
    ids=str,
)
def test_ranks_train_as_plain_ones(ranks: int, choice: Choice) -> None:
    clip = 0.1 if choice.optimizer and not choice.in_backward else 0.0
    subject = RankSubject(Shared(NET, (choice,) * ranks, clip=clip), Counts())
    assert sum("grad" in name or "weight" in name for name in subject.wanted[0]) > 10
    if subject.rounds:
        assert subject.to_program_order() == []
    for seed in SEEDS:
        assert subject.random(seed) == [], seed
    assert subject.poisoned > 0 and subject.interconnect.met > 0


def test_ranks_whose_inputs_have_new_sizes_at_other_times() -> None:
    """A rank that captures another graph has not seen for which outputs gradients come."""
    net = dataclasses.replace(NET, rows=(4, 7, 4), input_grad=False)
    choice = Choice(lookahead=4, more_slots=3, optimizer="sgd", in_backward=True)
    subject = RankSubject(Shared(net, (choice,) * 3), Counts())
    assert subject.to_program_order() == []
    for seed in SEEDS:
        assert subject.random(seed) == [], seed


def test_ranks_have_their_own_shards_and_data() -> None:
    subject = RankSubject(Shared(NET, (Choice(),) * 3), Counts())
    first, *_, last = subject.ranks
    sizes = [compat.local(rank.model.head.weight).shape[0] for rank in subject.ranks]
    assert sizes == [1, 1, 0], "two rows"
    assert not subject.wanted[0]["0.total"].equal(subject.wanted[1]["10.total"])
    assert first.device is not last.device


# The interconnect.


def meet(count: int, seed: int, *, swapped: bool = False, leaves: bool = False) -> list[Any]:
    interconnect = Interconnect(count)

    def body(rank: int) -> list[Any]:
        torch.manual_seed(rank)
        names = ["one", "two"]
        if rank == 1:
            names = names[::-1] if swapped else names[: 1 if leaves else 2]
        return [(interconnect.exchange(rank, n, rank), torch.rand(())) for n in names]

    def bound(rank: int) -> Callable[[], list[Any]]:
        return lambda: body(rank)

    return interconnect.run([bound(rank) for rank in range(count)], seed)


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_get_what_each_gives(seed: int) -> None:
    for rank, got in enumerate(meet(4, seed)):
        assert [values for values, _ in got] == [[0, 1, 2, 3]] * 2
        torch.manual_seed(rank)
        assert [number for _, number in got] == [torch.rand(()), torch.rand(())], "their own"


@pytest.mark.parametrize("seed", range(4))
def test_collectives_that_do_not_fit_are_an_error(seed: int) -> None:
    with pytest.raises(CollectiveError, match="rank 0 is in one, rank 1 in two"):
        meet(3, seed, swapped=True)
    with pytest.raises(CollectiveError, match="wait for ranks that have ended"):
        meet(3, seed, leaves=True)


# What it must see: faults of the passes, where `verify` looks away, and of the runtime.


Edit = Callable[[fx.Graph], None]
Fault = Callable[[RankSubject], AbstractContextManager[None]]


def edited(edit: Edit, *, of_rank: int | None = None) -> Fault:
    """A fault of schedules, of one rank or of all, behind the passes."""

    @contextmanager
    def planted(subject: RankSubject) -> Iterator[None]:
        def faulty(schedule: Schedule) -> Schedule:
            new = insert_tokens(schedule).copy()
            for graph in new.graphs.values():
                if of_rank in (None, subject.interconnect.current):
                    edit(graph)
            return new

        with (
            mock.patch.object(pipeline, "insert_tokens", faulty),
            mock.patch.object(compiler, "verify"),
        ):
            yield

    return planted


def no_wait_for_the_slot(graph: fx.Graph) -> None:
    """A part is copied into a slot whose weights are still read."""
    for node in ops.nodes_of(graph, ops.prefetch_shard):
        after: Any = node.kwargs.get("after", ())
        readers = (ops.forward, ops.recompute, ops.backward)
        node.kwargs = {"after": tuple(n for n in after if producer(n).target not in readers)}


def freed_before_they_are_averaged(graph: fx.Graph) -> None:
    """Gradients are given back as soon as the collective was issued."""
    means = set(ops.nodes_of(graph, ops.reduce_scatter))
    for node in ops.nodes_of(graph, ops.free, ops.defer_free):
        if means.intersection(node.all_input_nodes[1:]):
            node.kwargs = {}


def swap(graph: fx.Graph) -> None:
    """The first two gathers are in another order."""
    first, second, *_ = ops.nodes_of(graph, ops.all_gather) or (None, None)
    if first is not None and second is not None:
        second.append(first)


def no_averages_of_one_bucket(graph: fx.Graph) -> None:
    """A rank keeps its own gradients of the bucket that comes last."""
    for node in ops.nodes_of(graph, ops.reduce_scatter)[-1:]:
        _, _, buffer = ops.arguments(node)
        node.replace_all_uses_with(buffer)
        graph.erase_node(node)


def readers_do_not_wait(graph: fx.Graph) -> None:
    """Stages take what is in the slot when this rank's part is there."""
    for node in ops.nodes_of(graph, ops.all_gather):
        part = ops.arguments(node)[2]
        node.replace_all_uses_with(part)


@contextmanager
def gathers_at_once(subject: RankSubject) -> Iterator[None]:
    """A gather does not wait for the copy of this rank's part."""
    del subject
    real = CollectiveOps.all_gather

    def all_gather(self: Any, bucket: Bucket, slot: Slot, shard: Handle) -> Handle:
        return real(self, bucket, slot, Handle(None, shard.stream))

    with mock.patch.object(CollectiveOps, "all_gather", all_gather):
        yield


@contextmanager
def sums(subject: RankSubject) -> Iterator[None]:
    """Gradients are not divided by the number of ranks."""
    del subject
    real = SimulatedRanks.average

    def average(self: SimulatedRanks, gradients: Any, parts: dict[int, Tensor]) -> None:
        real(self, gradients, parts)
        for part in parts.values():
            part.mul_(self.count)

    with mock.patch.object(SimulatedRanks, "average", average):
        yield


@contextmanager
def another_rank_s_rows(subject: RankSubject) -> Iterator[None]:
    """A rank copies its rows to the places of the next one."""
    del subject
    real = SimulatedRanks.places

    def places(self: SimulatedRanks, bucket: Bucket, whole: Tensor) -> list[Tensor]:
        mine = real(self, bucket, whole)
        there = real(dataclasses.replace(self, rank=(self.rank + 1) % self.count), bucket, whole)
        return [b[: len(a)] if len(b) >= len(a) else a for a, b in zip(mine, there, strict=True)]

    with mock.patch.object(SimulatedRanks, "places", places):
        yield


FAULTS: dict[str, Fault] = {
    "slots are filled while they are read": edited(no_wait_for_the_slot),
    "gradients are freed while ranks average them": edited(freed_before_they_are_averaged),
    "one rank swaps two gathers": edited(swap, of_rank=1),
    "one rank averages less": edited(no_averages_of_one_bucket, of_rank=1),
    "stages do not wait for the gather": edited(readers_do_not_wait),
    "gathers do not wait for the copy": gathers_at_once,
    "gradients are sums": sums,
    "rows at other places": another_rank_s_rows,
}
ALWAYS = {  # the others are right where every op runs as soon as it is issued
    "one rank swaps two gathers",
    "one rank averages less",
    "gradients are sums",
    "rows at other places",
}
# Each is of a kind with one of the others: for `make thorough`.
ALIKE = {"gathers do not wait for the copy", "one rank averages less", "rows at other places"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a `del`
@pytest.mark.parametrize("name", drawn(sorted(FAULTS.keys() - ALIKE), sorted(ALIKE)))
def test_a_planted_fault_is_seen(name: str) -> None:
    choice = Choice(optimizer="sgd", lookahead=2)
    subject = RankSubject(Shared(NET, (choice,) * 2), Counts())
    with FAULTS[name](subject):
        in_order = _seen(lambda: subject.wrong(lambda _: InOrder(), 0))
        seen = [_seen(functools.partial(subject.random, seed)) for seed in range(8)]
    assert any(seen)
    assert in_order == (name in ALWAYS), "only some interleavings show it"


def _seen(case: Callable[[], list[str]]) -> bool:
    """Is an interleaving wrong, in its numbers or with an error?"""
    try:
        return case() != []
    except (RuntimeError, LookupError, NameError, AttributeError, TypeError, AssertionError):
        return True
