"""Streamed training is the plain one in every bit: models x loops x options, each pair of them.

A model is captured once and trained in several loops, in interleavings that an adversarial device
and a slow disk choose. A cell that cannot be must say so."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from torch import fx

from megacompile.errors import BackwardError, OptimizerError, OptionError
from megacompile.ir import ops
from tests import adversary, inside, prove
from tests.draws import drawn
from tests.equality import cells
from tests.equality.cells import Cell
from tests.nets import Choice, Net
from tests.subject import Case, Counts, Subject, alone
from tests.zoo import unlike

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
    pytest.mark.filterwarnings("ignore:megacompile. .* ignores "),
]

AXES = OrderedDict(
    model=list(cells.MODELS),
    optimizer=list(cells.OPTIMIZERS),
    numbers=list(cells.NUMBERS),
    saved=list(cells.SAVED),
    weights=list(cells.WEIGHTS),
    states=list(cells.STATES),
    updater=list(cells.UPDATERS),
    slots=list(cells.SLOTS),
)


def makes_sense(row: list[str]) -> bool:
    cell = Cell(*row)
    own = cell.optimizer not in cells.BY_RULE  # torch.optim's steps, in the parameters' dtype
    if own and (cell.in_backward or cell.numbers not in ("exact", "autocast", "masters")):
        return False
    if cell.model == "batch norm" and "masters" in cell.numbers:
        return False  # torch has no batch norm of bfloat16 with statistics of float32 on a CPU
    return True


def loops_of(k: int) -> list[str]:
    """A third of the loops, others in each of the next two cells; of those that an update in the
    backward refuses, one."""
    refused = cells.OF_SEVERAL if CELLS[k].in_backward else ()
    late = ("exchanged",) if refused else ()  # changes what has been updated
    taken = [name for name in cells.LOOPS if name not in (*refused, *late)]
    return [*taken[k % 3 :: 3], *refused[k % 4 : k % 4 + 1]]


CELLS = [Cell(*row) for row in AllPairs(AXES, filter_func=makes_sense)]
ALWAYS = 20  # the first cells have most of the pairs


NAMED = [
    pytest.param(
        k,
        id="-".join(getattr(cell, name).replace(" ", "_") for name in AXES),
        marks=[pytest.mark.thorough] if k >= ALWAYS else [],
    )
    for k, cell in enumerate(CELLS)
]


@pytest.mark.parametrize("k", NAMED)
def test_every_bit(k: int, tmp_path: Path) -> None:
    cell = CELLS[k]
    if cell.weights == "disk" and "masters" in cell.numbers:
        with pytest.raises(OptionError):
            cells.build(cell, tmp_path)
        return
    run = cells.build(cell, tmp_path)
    adversary.attach(run.model)
    for seed, loop in enumerate(loops_of(k), k):
        cells.on(run, loop)
        if cell.in_backward and loop in cells.OF_SEVERAL:
            with cells.adversarial(run, seed), pytest.raises((BackwardError, OptimizerError)):
                cells.trained(run)
            run.model.zero_grad()
            continue
        # whatever goes through a file comes back in every bit
        want = cells.expected(replace(run.cell, loop="once" if loop == "saved" else loop))
        with cells.adversarial(run, seed):
            got = cells.trained(run)
        assert unlike(want, got) == [], (loop, seed)
    run.reset()
    gc.collect()
    assert inside.machine(run.model).activations.lent_bytes == 0


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
    subject = Subject(Case(LATE, (Choice(lookahead=4, more_slots=1),)), Counts())
    for seed in range(4):
        assert subject.wrong(adversary.Random(seed)) == [], seed
    assert subject.poisoned > 0


@pytest.mark.parametrize("cases", drawn([8], [40]))
def test_random_cases_equal_the_plain_model(cases: int) -> None:
    counts = prove.prove(alone(), cases, seed=0, interleavings=4)
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
    subject = Subject(Case(NET, (choice,)), Counts())
    assert (subject.to_program_order() if subject.rounds else subject.in_order()) == []
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
