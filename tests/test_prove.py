"""The proof on a few cases, and that it sees what it is there to see.

`python -m tests.prove` does more.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.schedule.free import insert_free
from megacompile.plan import compiler, pipeline
from megacompile.runtime.model import autograd_nodes
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params.accumulators import Accumulator, Users
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.verify import cycle as verify_cycle
from megacompile.verify import memory as verify_memory
from megacompile.verify import updates as verify_updates
from tests import adversary, inside, loops, originals, prove
from tests.draws import drawn
from tests.interrupts import Opcodes, traced
from tests.loops import Loop
from tests.mutants import Harm, Truth, mutate
from tests.nets import Choice, Net
from tests.subject import Counts, InOrder, Subject, differences
from tests.symbolic import Path

ONCE = Net(  # each parameter is used once, so that every sum is the plain model's
    kinds=("linear", "block", "gain"), hidden=8, calls=(0, 1, 2), outputs=(1,), in_loss=True
)
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


@pytest.mark.parametrize("cases", drawn([20], [40]))
def test_random_cases_equal_the_plain_model(cases: int) -> None:
    counts = prove.prove(cases, seed=0, interleavings=4)
    assert counts.found == []
    assert counts.cases >= cases and counts.mismatches == 0 and len(counts.plans) >= cases // 5
    assert len(counts.features) >= 3


LOOPS = {
    "penalty": Loop(penalty=255, penalty_first=True, view=1),
    "twice": Loop(twice=True, head=True),
    "hooks": Loop(hooks=tuple((kind, k) for k, kind in enumerate(loops.HOOKS))),
    "threads": Loop(threads=True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_users_do_around_a_model(name: str) -> None:
    subject = Subject(ONCE, Choice(), Counts(), LOOPS[name])
    assert not subject.rounds
    for seed in range(4):
        assert subject.wrong(adversary.Random(seed)) == [], seed


def test_autograd_adds_the_sum_of_two_calls_when_its_copy_is_done() -> None:
    """The second backward of a step: the sum of both calls is added to `p.grad` at once."""
    subject = Subject(ONCE, Choice(), Counts(), Loop(twice=True))
    for seed in range(24):
        assert subject.wrong(adversary.Random(seed)) == [], seed


def test_an_update_in_the_backward_is_refused_before_it_updates() -> None:
    choice = Choice(optimizer="sgd", in_backward=True, backwards=1)
    for loop in (Loop(penalty=255), Loop(twice=True), Loop(hooks=(("tensor", 0),))):
        subject = Subject(ONCE, choice, Counts(), loop)
        assert subject.wrong(InOrder()) == [], loop
        assert subject.counts.refused_updates == 1, loop


@pytest.mark.parametrize("resident", [1, 2])
@pytest.mark.parametrize("in_backward", [False, True])
def test_residents_on_an_adversarial_device(resident: int, in_backward: bool) -> None:
    choice = Choice(optimizer="adamw", in_backward=in_backward, resident=resident)
    subject = Subject(NET, choice, Counts(), Loop())
    assert inside.residents(subject.model)
    if subject.rounds:
        assert subject.to_program_order() == []
    for seed in range(6):
        assert subject.wrong(adversary.Random(seed)) == [], seed


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_a_disk_and_an_update_in_the_backward(weights: bool, saved: bool) -> None:
    choice = Choice(
        optimizer="adamw",
        in_backward=True,
        disk=True,
        disk_weights=weights,
        offload=saved,
        disk_saved=saved,
        stored=255,
        lookahead=2,
    )
    subject = Subject(NET, choice, Counts())
    assert subject.to_program_order() == []
    for seed in range(6):
        assert subject.wrong(adversary.Random(seed)) == [], seed
    staging = inside.machine(subject.model).staging
    assert staging is not None and staging.written_bytes


class Everything(frozenset[object]):
    """It contains whatever is asked for."""

    def __contains__(self, item: object) -> bool:
        return True


@contextmanager
def nobody_else() -> Iterator[None]:
    """The runtime does not see that others use parameters."""
    nobody = Users(frozenset(), frozenset(), Everything())
    with mock.patch.object(autograd_nodes, "users_of", lambda *_: nobody):
        yield


@contextmanager
def no_hooks() -> Iterator[None]:
    """The runtime does not see hooks."""
    with mock.patch.object(Accumulator, "hooked", property(lambda self: False)):
        yield


@pytest.mark.parametrize(
    ("blind", "loop"),
    [(nobody_else, Loop(penalty=255)), (no_hooks, Loop(hooks=(("post accumulate", 0),)))],
    ids=["penalty", "hooks"],
)
def test_a_runtime_that_is_blind_to_the_loop_is_seen(
    blind: Callable[[], AbstractContextManager[None]], loop: Loop
) -> None:
    subject = Subject(ONCE, Choice(), Counts(), loop)
    with blind():
        assert any(seen(subject, adversary.Random(seed)) for seed in SEEDS)


def test_a_model_that_keeps_a_proxy_after_an_interrupt_is_seen() -> None:
    subject = Subject(ONCE, Choice(), Counts(), Loop(interrupt=0))
    holder = subject.model.head._parameters

    def interrupted(opcodes: Opcodes) -> None:
        opcodes.counts["a function"] = 1
        holder["bias"] = StreamedParameter(holder["bias"].detach(), torch.device("cpu"))

    with (
        mock.patch.object(subject, "_stop_at", interrupted),
        pytest.raises(AssertionError, match=r"head.bias is a proxy"),
    ):
        subject.wrong(adversary.Policy())


def test_an_interrupt_comes_before_the_opcode_that_was_chosen() -> None:
    counted = Opcodes()
    with traced(counted):
        TensorMeta.of(torch.empty(2))
    place = next(iter(counted.counts)), 3
    stopped = Opcodes(place)
    with pytest.raises(KeyboardInterrupt), traced(stopped):
        TensorMeta.of(torch.empty(2))
    assert stopped.counts == {place[0]: 3} and place[0] in stopped.stopped


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


def test_a_gradient_to_add_to_is_fetched_after_the_backward_was_issued() -> None:
    """The op asks where the gradient lies, and may run when the next schedule is on already."""
    tied = Net(kinds=("gain", "linear"), hidden=5, calls=(0, 1, 1), tied=((0, 1),))
    subject = Subject(tied, Choice(lookahead=4, more_slots=1), Counts())
    for seed in SEEDS:
        assert subject.wrong(adversary.Random(seed)) == [], seed


def test_autograd_adds_to_the_users_gradient_when_the_copy_is_done() -> None:
    """`p.grad` is a tensor of the user's: autograd reads what it adds at once."""
    subject = Subject(NET, Choice(), Counts(), Loop(given=255))
    for seed in SEEDS:
        assert subject.wrong(adversary.Random(seed)) == [], seed


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
    prefetches = ops.nodes_of(graph, ops.prefetch)
    for first, second in zip(prefetches[:1], prefetches[1:], strict=False):
        second.args = (second.args[0], first.args[1])


FAULTS: dict[str, Fault] = {
    "slots are filled at once": no_after(ops.prefetch),
    "memory is freed under a copy": frees_at_once,
    "two buckets in one slot": swapped_slots,
    "deferred for nobody": no_after(ops.defer_free),
    "states are written at once": no_after(ops.write_state),
}
IN_BACKWARD = {
    "deferred for nobody": Choice(optimizer="sgd", in_backward=True),
    "states are written at once": Choice(
        optimizer="adamw", in_backward=True, disk=True, stored=255, backwards=1
    ),
}


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    insert = insert_free

    def faulty(schedule: Schedule) -> Schedule:
        new = insert(schedule).copy()
        for graph in new.graphs.values():
            fault(graph)
        return new

    with mock.patch.object(pipeline, "insert_free", faulty), mock.patch.object(compiler, "verify"):
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    choice = IN_BACKWARD.get(name, Choice())
    subject = Subject(NET, choice, Counts())
    if choice.in_backward:
        assert subject.to_program_order() == []
        for graph in inside.streamed(subject.model).graphs:
            graph.programs.clear()
    if choice.disk:  # a run that fails may leave the next one half updated
        with planted(FAULTS[name]):
            assert any(seen(subject, adversary.Random(seed)) for seed in SEEDS)
        return
    with planted(FAULTS[name]):
        found = [seen(subject, adversary.Random(seed)) for seed in SEEDS]
    assert any(found)
    if name != "two buckets in one slot":
        assert not all(found), "only some interleavings show it"


def seen(subject: Subject, policy: adversary.Policy) -> bool:
    """Is an interleaving wrong, in its numbers or with an error?"""
    try:
        return subject.wrong(policy) != []
    except prove._ERRORS:
        return True


def test_differences_are_found() -> None:
    subject = Subject(dataclasses.replace(NET, outputs=()), Choice(), Counts())
    other = {**subject.wanted}
    name, value = next((k, v) for k, v in other.items() if k.endswith("grad"))
    other[name] = value.nextafter(value + 1)
    assert differences(subject.wanted, other) == [name]
    del other[name]
    assert differences(subject.wanted, other) == [name]


# Mutants.


def test_verify_reports_every_harmful_mutant_and_nothing_else() -> None:
    schedules = originals.hand_made(60, seed=1) + originals.ran(8, seed=1)
    counts = prove.prove_verify(300, 1, schedules)
    assert counts.missed == [] and counts.false_alarms == 0
    assert counts.of(Harm.WRONG, reported=True) > 50
    assert counts.of(Harm.NONE, reported=False) > 20, "it does not report everything"


def test_verify_reports_every_harmful_mutant_of_a_step() -> None:
    schedules = originals.hand_made(30, seed=3) + originals.planned(8, seed=3)
    counts = prove.prove_verify(0, 3, schedules, of_steps=200)
    assert counts.missed == [] and counts.false_alarms == 0
    assert counts.step is not None
    assert counts.step.of(Harm.WRONG, reported=True) > 50
    assert counts.step.of(Harm.NONE, reported=False) > 30, "it does not report everything"
    assert len(counts.step.edits) > 20, "of every kind"


def test_a_verifier_that_is_blind_to_the_update_is_found_out() -> None:
    schedules = originals.hand_made(20, seed=3)
    with mock.patch.object(verify_updates, "updated_once", lambda views: iter(())):
        assert prove.prove_verify(0, 3, schedules, of_steps=200).missed


def test_a_verifier_that_is_blind_between_graphs_is_found_out() -> None:
    schedules = originals.hand_made(20, seed=5)
    with mock.patch.object(verify_cycle, "hazards", lambda views: iter(())):
        assert prove.prove_verify(0, 5, schedules, of_steps=100).missed


def test_a_blind_verifier_is_found_out() -> None:
    """The test of the test: without one of its checks, `verify` misses harmful mutants."""
    schedules = originals.hand_made(40, seed=2)
    with mock.patch.object(verify_memory, "CHECKS", ()):
        assert prove.prove_verify(150, 2, schedules).missed


class Replay(adversary.LateExecutor):
    """Runs the backward of a mutant in a given order."""

    def __init__(self, mutant: Schedule, machine: Machine, path: Path) -> None:
        self.path = path
        super().__init__(mutant, machine)

    def _compile(self, name: str) -> Callable[[list[Any]], Any]:
        run = super()._compile(name)

        def replay(taken: list[Any]) -> Any:
            self.device.policy = adversary.Witness(self.path)
            return run(taken)

        return replay if name == "backward" else run


@pytest.mark.parametrize("lookahead", [1, 3])
def test_what_is_wrong_on_symbols_is_wrong_in_numbers(lookahead: int) -> None:
    """The interleaving in which a mutant goes wrong, carried out on the adversarial device."""
    net = dataclasses.replace(NET, in_loss=False)
    subject = Subject(net, Choice(lookahead=lookahead, backwards=1), Counts())
    assert subject.wrong(adversary.Policy()) == []
    assert subject.wrong(adversary.Policy()) == []  # the gradients that are expected by now
    (program,) = inside.programs(subject.model)
    variant, executor = list(program.executors.items())[-1]
    assert variant.reuse and not variant.accumulate
    truth, rng = Truth(executor.schedule), random.Random(0)
    shown, hidden = 0, []
    for _ in range(150):
        mutant, edits = mutate(executor.schedule, rng)
        verdict = truth.judge(mutant)
        if verdict.graph != "backward" or verdict.path is None:
            continue
        replay = Replay(mutant, executor.machine, verdict.path)
        with mock.patch.dict(program.executors, {variant: replay}):
            wrong = seen(subject, adversary.Policy())
        shown += wrong
        hidden += [] if wrong else [edits]
    # poison cannot see all: memory with another view of it is left alone, and a step keeps others
    assert shown >= 10 and len(hidden) <= shown / 2, hidden
