"""The proof, as a command: random models and plans on an adversarial device; mutants of schedules.

    python -m tests.prove --cases 2000 --seed 0      random models against the plain ones
    python -m tests.prove --mutants 1000 --seed 0    broken schedules against `verify`

A case is one interleaving of one plan of one model: two or four forwards and backwards, or steps of
an optimizer, whose losses, outputs, gradients, parameters and buffers must be those of the plain
model in every bit. Where the backward makes the optimizer's update, parameters must be in every bit
those of program order, and within 1e-5 of the plain loop. Models and plans are drawn by hypothesis;
several interleavings (`--interleavings`) share a model and a plan, whose tracing takes most of the
time.

A mutant is a schedule with one or two edits: `tests.mutants` says which, and decides by all
interleavings whether it is harmful. Half of the schedules are made by the passes for random models,
half by hand (`tests.schedules`).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor

from megacompile import api, compiler, megacompile, schedules
from megacompile.ir import Schedule
from megacompile.passes.plan import make_plan
from megacompile.verify import hazards
from tests import adversary, nets
from tests.mutants import Harm, Truth, mutate
from tests.nets import Choice, Net
from tests.schedules import Spec, build
from tests.zoo import equal

Result = dict[str, Tensor]
STEPS = 2  # of a case with an optimizer


@dataclasses.dataclass
class Counts:
    """What was proved."""

    cases: int = 0
    mismatches: int = 0
    models: set[Net] = dataclasses.field(default_factory=set)
    plans: set[tuple[Net, Choice]] = dataclasses.field(default_factory=set)
    found: list[str] = dataclasses.field(default_factory=list)  # the mismatches
    refused: int = 0  # models that the plain loop cannot run
    stages: int = 0
    kept: int = 0  # stages that were kept by a random choice
    in_backward: int = 0
    ops: int = 0
    poisoned: int = 0

    def __str__(self) -> str:
        features: dict[str, Callable[[Net], object]] = {
            "call a layer again": lambda net: len(net.calls) > len(net.kinds),
            "skip over stages": lambda net: net.skips,
            "tie matrices": lambda net: net.tied,
            "freeze a layer": lambda net: net.frozen,
            "change in place": lambda net: net.changed or "in place" in net.kinds,
            "have buffers": lambda net: {"batch norm", "fixed"} & set(net.kinds),
            "draw random numbers": lambda net: "dropout" in net.kinds,
            "take two inputs": lambda net: net.second >= 0,
            "give several outputs": lambda net: net.outputs,
        }
        of_these = [f"{sum(map(bool, map(f, self.models)))} {what}" for what, f in features.items()]
        return (
            f"{self.cases} (model, plan, interleaving) cases, {self.mismatches} mismatches\n"
            f"  {len(self.models)} distinct models, {len(self.plans)} distinct (model, plan) "
            f"pairs, {self.in_backward} of these with the update in the backward\n"
            f"  of the models {', '.join(of_these)}\n"
            f"  {self.stages} stages, {self.kept} of them kept by a random choice\n"
            f"  {self.ops} ops executed, {self.poisoned} times memory was poisoned\n"
            f"  {self.refused} drawn models that the plain loop refuses were left out"
        )


@contextlib.contextmanager
def kept(choice: Choice, counts: Counts) -> Iterator[None]:
    """Keep the saved tensors of the stages whose bit is set; let states leave as late as chosen."""
    bits = choice.keep

    def chosen(schedule: Schedule, *, keep: int = 1, **options: Any) -> Schedule:
        options["state_delay"] = choice.state_delay
        planned = make_plan(schedule, keep=keep, **options)
        if bits < 0 or not keep or schedule.backward is None:
            return planned
        able = [s.index for s in schedule.stages if s.traced.has_backward]
        drawn = frozenset(i for i in able if bits >> (i % 8) & 1)
        counts.kept += len(drawn)
        plan = dataclasses.replace(planned.plan, keep=drawn, reasons=("at random",))
        return dataclasses.replace(planned, plan=plan)

    with mock.patch.object(compiler, "make_plan", chosen):
        yield


def run(model: Any, net: Net, choice: Choice, optimizer: Any) -> Result:
    """Train a little; gives everything that can be seen."""
    streamed = model._compiled_call_impl is not None
    seen: Result = {}
    for step in range(STEPS if optimizer is not None else 1):
        for k in range(choice.backwards):
            which = step * choice.backwards + k
            inputs = nets.data(net, which)
            torch.manual_seed(which)
            loss, values = model(**inputs)
            total = loss
            for value in values if net.in_loss else []:
                total = total + value.square().sum()
            accumulates = streamed and choice.in_backward and k + 1 < choice.backwards
            with api.accumulate(model) if accumulates else contextlib.nullcontext():
                total.backward()
            seen[f"{which}.loss"] = loss.detach().clone()
            seen |= {f"{which}.out{i}": v.detach().clone() for i, v in enumerate(values)}
            gradient = inputs["x"].grad
            seen |= {} if gradient is None else {f"{which}.x.grad": gradient.clone()}
            seen[f"{which}.rng"] = torch.get_rng_state()
        if not choice.in_backward:
            for name, param in model.named_parameters():
                if param.grad is not None:
                    seen[f"{step}.{name}.grad"] = param.grad.detach().clone()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    seen |= {name: param.detach().clone() for name, param in model.named_parameters()}
    seen |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return seen


def make_optimizer(model: Any, choice: Choice) -> Any:
    params = [p for p in model.parameters() if p.requires_grad]
    if choice.optimizer == "adamw":
        # in the backward it rounds differently, which a small eps would blow up where the gradient
        # is all rounding (a bias before a BatchNorm)
        return torch.optim.AdamW(params, lr=0.01, eps=0.1 if choice.in_backward else 1e-8)
    if choice.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return None


def differences(wanted: Result, got: Result, *, rtol: float = 0.0) -> list[str]:
    """What is missing or different."""
    found = sorted(wanted.keys() ^ got.keys())
    for name in wanted.keys() & got.keys():
        a, b = wanted[name], got[name]
        if rtol and a.dtype.is_floating_point and a.shape == b.shape:
            same = torch.allclose(a, b, rtol=rtol, atol=rtol)
        else:
            same = equal(a, b)
        found += [] if same else [name]
    return sorted(found)


class Subject:
    """A model with a plan: the plain run, and the megacompiled one on an adversarial device."""

    def __init__(self, net: Net, choice: Choice, counts: Counts) -> None:
        self.net, self.choice, self.counts = net, choice, counts
        plain = nets.build(net)
        self.wanted = run(plain, net, choice, make_optimizer(plain, choice))
        torch.compiler.reset()
        self.model: Any = nets.build(net)
        self.optimizer = make_optimizer(self.model, choice)
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        megacompile(
            self.model,
            device="cpu",
            lowering="eager",
            lookahead=choice.lookahead,
            slots=choice.lookahead + 1 + choice.more_slots,
            optimizer=self.optimizer if choice.in_backward else None,
        )
        self.device = adversary.attach(self.model)
        self.rtol = 0.0

    def wrong(self, policy: adversary.Policy) -> list[str]:
        """What one interleaving gives that is not as it should be."""
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self.device.policy = policy
        with adversary.adversarial(), kept(self.choice, self.counts):
            got = run(self.model, self.net, self.choice, self.optimizer)
        return differences(self.wanted, got, rtol=self.rtol)

    def to_program_order(self) -> list[str]:
        """Compare with this model in program order from now on; gives how the plain one differs.

        For the update in the backward, which rounds differently from torch.optim.
        """
        self.rtol = 1e-5
        found = self.wrong(InOrder())
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        self.optimizer.state.clear()
        with adversary.adversarial(), kept(self.choice, self.counts):
            self.wanted = run(self.model, self.net, self.choice, self.optimizer)
        self.rtol = 0.0
        return found


class InOrder(adversary.Policy):
    """Every op runs as soon as it is issued."""

    def after_issue(self) -> int:
        return 2**16


def plain_refuses(net: Net, choice: Choice) -> bool:
    """Does autograd refuse the plain model? (A value it needs was changed in place.)"""
    try:
        model = nets.build(net)
        run(model, net, dataclasses.replace(choice, in_backward=False), None)
    except RuntimeError:
        return True
    return False


def check(net: Net, choice: Choice, interleavings: int, seed: int, counts: Counts) -> None:
    """Some cases of one model and plan; mismatches are counted, not raised."""
    if plain_refuses(net, choice):
        counts.refused += 1
        hypothesis.reject()
    subject = Subject(net, choice, counts)
    wrong: dict[object, list[str]] = {}
    if choice.in_backward and (found := subject.to_program_order()):
        wrong["program order"] = found
        counts.mismatches += 1
    for k in range(seed, seed + interleavings):
        found = subject.wrong(adversary.Random(k))
        counts.cases += 1
        counts.mismatches += bool(found)
        wrong |= {k: found} if found else {}
    counts.models.add(net)
    counts.plans.add((net, choice))
    counts.in_backward += choice.in_backward
    counts.stages += sum(len(s.stages) for s in schedules(subject.model))
    counts.ops += subject.device.executed
    counts.poisoned += subject.device.memory.poisoned
    if wrong:
        counts.found.append(f"{net}\n{choice}\ninterleavings that differ: {wrong}")


def prove(cases: int, seed: int, interleavings: int, *, shrink: bool = False) -> Counts:
    """Run `cases` cases, or a few more to complete the last model's.

    Raises:
        AssertionError: with `shrink`, of the smallest model that is found to differ.
    """
    counts = Counts()
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2 * -(-cases // interleavings) + 10,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(nets.nets(), nets.choices(), st.integers(0, 2**30))
    def one(net: Net, choice: Choice, first: int) -> None:
        if counts.cases >= cases:
            return
        check(net, choice, interleavings, first, counts)
        if shrink and counts.found:
            raise AssertionError(counts.found.pop())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one()
    return counts


@dataclasses.dataclass
class Mutants:
    """How `verify` judged mutants, and schedules that are right."""

    judged: collections.Counter[tuple[Harm, bool]]
    edits: int = 0
    schedules: int = 0
    false_alarms: int = 0
    missed: list[str] = dataclasses.field(default_factory=list)

    def of(self, *harms: Harm, reported: bool) -> int:
        return sum(self.judged[harm, reported] for harm in harms)

    def __str__(self) -> str:
        harmful = (Harm.WRONG, Harm.CRASH)
        wrong, crash = (self.of(harm, reported=True) for harm in harmful)
        return (
            f"{self.schedules} unmodified schedules, {self.false_alarms} false alarms\n"
            f"{sum(self.judged.values())} mutants\n"
            f"  harmful, caught: {wrong + crash} ({wrong} that give wrong results, {crash} that "
            "raise)\n"
            f"  harmful, missed: {self.of(*harmful, reported=False)}\n"
            f"  harmless, flagged: {self.of(Harm.NONE, reported=True)}\n"
            f"  harmless, passed: {self.of(Harm.NONE, reported=False)}\n"
            f"  with too many interleavings to decide: "
            f"{self.of(Harm.UNDECIDED, reported=True)} flagged, "
            f"{self.of(Harm.UNDECIDED, reported=False)} passed"
        )


def real_schedules(count: int, seed: int) -> list[Schedule]:
    """At least `count` schedules that the passes make for random models and plans."""
    found: list[Schedule] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(nets.nets(), nets.choices())
    def one(net: Net, choice: Choice) -> None:
        if len(found) >= count or plain_refuses(net, choice):
            return
        subject = Subject(net, choice, Counts())
        subject.wrong(InOrder())
        graphs = subject.model._compiled_call_impl.graphs
        programs = [p for graph in graphs for p in graph.programs.values() if p is not None]
        found.extend(e.schedule for p in programs for e in p.executors.values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one()
    return found


def hand_made(count: int, seed: int) -> list[Schedule]:
    """Random schedules of `tests.schedules`, which no pass makes."""
    rng = random.Random(seed)

    def some(stages: int) -> frozenset[int]:
        return frozenset(i for i in range(stages) if rng.random() < 0.25)

    found = []
    for _ in range(count):
        stages = rng.randint(1, 6)
        spec = Spec(
            stages=stages,
            slots=rng.randint(2, 4),
            accumulate=rng.random() < 0.4,
            shared=stages > 1 and rng.random() < 0.3,
            hold=rng.random() < 0.4,
            random=some(stages),
            keep=some(stages),
            changes=some(stages),
            update=rng.random() < 0.3,
            masters=rng.random() < 0.3,
        )
        norms = not spec.update and rng.random() < 0.3
        found.append(build(dataclasses.replace(spec, norms=norms)))
    return found


def prove_verify(mutants: int, seed: int, originals: list[Schedule]) -> Mutants:
    """Judge the originals, and `mutants` mutants of them."""
    counts = Mutants(collections.Counter(), schedules=len(originals))
    truths = []
    for schedule in originals:
        counts.false_alarms += bool(hazards(schedule))
        truths.append(Truth(schedule))
    rng = random.Random(seed)
    for _ in range(mutants):
        truth = rng.choice(truths)
        mutant, edits = mutate(truth.schedule, rng)
        verdict, reported = truth.judge(mutant), bool(hazards(mutant))
        counts.judged[verdict.harm, reported] += 1
        if verdict.harm in (Harm.WRONG, Harm.CRASH) and not reported:
            counts.missed.append(f"missed: {verdict.graph}: {edits} ({verdict.why})")
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--mutants", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=320, help="that are mutated")
    parser.add_argument("--interleavings", type=int, default=8, help="of a model and plan")
    parser.add_argument(
        "--shrink", action="store_true", help="look for a smaller model that differs"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    start = time.perf_counter()
    failed = False
    if args.cases:
        counts = prove(args.cases, args.seed, args.interleavings, shrink=args.shrink)
        print("\n".join([*counts.found, str(counts)]))
        failed |= counts.mismatches > 0
    if args.mutants:
        half = args.schedules // 2
        originals = real_schedules(half, args.seed) + hand_made(half, args.seed)
        found = prove_verify(args.mutants, args.seed, originals)
        print("\n".join([*found.missed, str(found)]))
        failed |= bool(found.missed) or found.false_alarms > 0
    print(f"{time.perf_counter() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
