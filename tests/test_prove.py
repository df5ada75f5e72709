"""The proof on a few cases, and that it sees what it is there to see: `python -m tests.prove` does more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import fx

from megacompile import api, ops
from megacompile.ir import Schedule
from tests import adversary, prove
from tests.nets import Choice, Net
from tests.prove import Counts, Subject, differences

NET = Net(
    kinds=("linear", "block", "dropout", "batch norm", "linear"),
    hidden=8,
    calls=(0, 1, 2, 3, 4, 1),
    skips=((3, 0),),
    tied=((4, 0),),
    second=1,
    input_grad=True,
    outputs=(2,),
    in_loss=True,
)
SEEDS = range(12)


def test_random_cases_equal_the_plain_model() -> None:
    counts = prove.prove(40, seed=0, interleavings=8)
    assert counts.found == []
    assert counts.cases >= 40 and counts.mismatches == 0 and len(counts.plans) >= 4


@pytest.mark.parametrize(
    "choice",
    [
        Choice(),
        Choice(lookahead=3, keep=0b101),
        Choice(optimizer="adamw"),
        Choice(optimizer="sgd", in_backward=True),
    ],
    ids=str,
)
def test_a_model_with_everything(choice: Choice) -> None:
    subject = Subject(NET, choice, Counts())
    if choice.in_backward:
        assert subject.to_program_order() == []
    for seed in SEEDS:
        assert subject.wrong(adversary.Random(seed)) == [], seed
    assert subject.device.memory.poisoned > 0


# What it must see. A fault is planted behind the passes, and `verify` looks away.

Fault = Callable[[fx.Graph], None]


def no_after(*targets: Callable[..., Any]) -> Fault:
    def plant(graph: fx.Graph) -> None:
        for node in ops.nodes_of(graph, *targets):
            node.kwargs = {}

    return plant


def frees_at_once(graph: fx.Graph) -> None:
    """Each value that is offloaded is given back as soon as its copy was issued."""
    for node in ops.nodes_of(graph, ops.free):
        for reader in node.all_input_nodes[1:]:
            node.kwargs = {}
            reader.append(node)


def swapped_slots(graph: fx.Graph) -> None:
    """The second prefetch goes where the first one went."""
    first, second, *_ = ops.nodes_of(graph, ops.prefetch)
    second.args = (second.args[0], first.args[1])


FAULTS: dict[str, Fault] = {
    "slots are filled at once": no_after(ops.prefetch),
    "memory is freed under a copy": frees_at_once,
    "two buckets in one slot": swapped_slots,
    "parked for nobody": no_after(ops.park),
}


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    insert = api.insert_free

    def faulty(schedule: Schedule) -> Schedule:
        new = insert(schedule).copy()
        for graph in new.graphs.values():
            fault(graph)
        return new

    with mock.patch.object(api, "insert_free", faulty), mock.patch.object(api, "verify"):
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    choice = Choice(optimizer="sgd" if "parked" in name else "", in_backward="parked" in name)
    subject = Subject(NET, choice, Counts())
    if choice.in_backward:
        assert subject.to_program_order() == []
        for graph in subject.model._compiled_call_impl.graphs:
            graph.programs.clear()
    with planted(FAULTS[name]):
        found = [seen(subject, seed) for seed in SEEDS]
    assert any(found)
    if name != "two buckets in one slot":
        assert not all(found), "only some interleavings show it"


def seen(subject: Subject, seed: int) -> bool:
    """Is an interleaving wrong, in its numbers or with an error?"""
    try:
        return subject.wrong(adversary.Random(seed)) != []
    except (RuntimeError, IndexError, NameError):
        return True


def test_differences_are_found() -> None:
    subject = Subject(dataclasses.replace(NET, outputs=()), Choice(), Counts())
    other = {**subject.wanted}
    name, value = next((k, v) for k, v in other.items() if k.endswith("grad"))
    other[name] = value.nextafter(value + 1)
    assert differences(subject.wanted, other) == [name]
    del other[name]
    assert differences(subject.wanted, other) == [name]
