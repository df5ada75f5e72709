"""The proof on a few cases, and that it sees what it is there to see.

`python -m tests.prove` draws thousands: models, plans, interleavings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from megacompile.ir import ops
from tests import adversary, inside, prove
from tests.draws import drawn
from tests.nets import Choice, Net
from tests.subject import Counts, InOrder, Subject

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
LATE = Net(kinds=("gain", "linear"), hidden=5, calls=(0, 1, 1), tied=((0, 1),))


def test_a_fetch_that_runs_when_the_next_schedule_is_on() -> None:
    subject = Subject(LATE, Choice(lookahead=4, more_slots=1), Counts())
    for seed in range(4):
        assert subject.wrong(adversary.Random(seed)) == [], seed
    assert subject.device.memory.poisoned > 0


@pytest.mark.parametrize("cases", drawn([8], [40]))
def test_random_cases_equal_the_plain_model(cases: int) -> None:
    counts = prove.prove(cases, seed=0, interleavings=4)
    assert counts.found == []
    assert counts.cases >= cases and counts.mismatches == 0 and len(counts.plans) >= cases // 5


# What it must see: a fault is in the schedule that runs, behind the proof.

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
    prefetches = ops.nodes_of(graph, ops.prefetch)
    for first, second in zip(prefetches[:1], prefetches[1:], strict=False):
        second.args = (second.args[0], first.args[1])


IN_BACKWARD = Choice(optimizer="sgd", in_backward=True)
ON_DISK = Choice(optimizer="adamw", in_backward=True, disk=True, stored=255, backwards=1)
FAULTS: dict[str, tuple[Choice, Fault]] = {
    "slots are filled at once": (Choice(), no_after(ops.prefetch)),
    "memory is freed under a copy": (Choice(), frees_at_once),
    "two buckets in one slot": (Choice(), swapped_slots),
    "deferred for nobody": (IN_BACKWARD, no_after(ops.defer_free)),
    "states are written at once": (ON_DISK, no_after(ops.write_state)),
}


def plant(subject: Subject, fault: Fault) -> None:
    for program in inside.programs(subject.model):
        for variant, executor in program.executors.items():
            schedule = executor.schedule.copy()
            for graph in schedule.graphs.values():
                fault(graph)
            program.executors[variant] = adversary.LateExecutor(schedule, executor.machine)


@pytest.mark.parametrize("choice", drawn([Choice()], [IN_BACKWARD, ON_DISK]), ids=str)
def test_a_planted_fault_is_seen(choice: Choice) -> None:
    """Some interleavings show it."""
    subject = Subject(NET, choice, Counts())
    assert (subject.to_program_order() if subject.rounds else subject.wrong(InOrder())) == []
    right = [dict(program.executors) for program in inside.programs(subject.model)]
    for name, (of, fault) in FAULTS.items():
        if of == choice:
            plant(subject, fault)
            assert any(seen(subject, adversary.Random(seed)) for seed in range(12)), name
            for program, executors in zip(inside.programs(subject.model), right, strict=True):
                program.executors.update(executors)


def seen(subject: Subject, policy: adversary.Policy) -> bool:
    """Is an interleaving wrong, in its numbers or with an error?"""
    try:
        return subject.wrong(policy) != []
    except prove._ERRORS:
        return True
