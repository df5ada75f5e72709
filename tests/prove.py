"""The proof, as a command: random models and plans on an adversarial device; mutants of schedules.

    python -m tests.prove --cases 2000 --seed 0      random models against the plain ones
    python -m tests.prove --mutants 1000 --seed 0    broken schedules against `verify`

A case is one interleaving of one plan of one model: two or four forwards and backwards, or steps of
an optimizer, whose losses, outputs, gradients, parameters and buffers must be those of the plain
model in every bit. Most of the loops do more (`tests.loops`): parameters are used outside of the
model too, hooks look, threads, children and Ctrl-C come between. Where the backward makes the
optimizer's update, or other users add to the sum of several uses in the model, all must be in every
bit that of program order, and within 1e-5 of the plain loop. An update in the backward may be
refused where others use the parameters, before anything is updated. Models, plans and loops are
drawn by hypothesis; several interleavings (`--interleavings`) share these, because tracing takes
most of the time.

A mutant is a schedule with one or two edits: `tests.mutants` says which, and decides by
interleavings whether it is harmful. Of the schedules, some are those that random models ran, some
were made by the passes for random models and plans without running them, and the others by hand
(`tests.schedules`). As many mutants again are of updates and of the edges between graphs
(`tests.mutants_step`): they have a table of their own, the last one.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from megacompile import schedules
from megacompile.ir.schedule import Schedule
from megacompile.verify.proof import hazards
from tests import adversary, inside, loops, mutants_step, nets
from tests.capturing import capture
from tests.loops import Loop
from tests.mutants import Harm, Truth, Verdict, mutate
from tests.nets import Choice, Net
from tests.schedules import Spec, build
from tests.subject import Counts, InOrder, Subject, plain_refuses


def check(
    net: Net, choice: Choice, loop: Loop, interleavings: int, seed: int, counts: Counts
) -> None:
    """Some cases of one model, plan and loop; mismatches are counted, not raised."""
    if plain_refuses(net, choice, loop):
        counts.refused += 1
        hypothesis.reject()
    subject = Subject(net, choice, counts, loop)
    wrong: dict[object, object] = {}
    if subject.rounds and (found := looked_at(subject.to_program_order)):
        wrong["program order"] = found
        counts.mismatches += 1
    for k in range(seed, seed + interleavings):
        found = looked_at(functools.partial(subject.wrong, adversary.Random(k)))
        counts.cases += 1
        counts.mismatches += bool(found)
        wrong |= {k: found} if found else {}
        if isinstance(found, str):  # the model may be in chunks
            break
    counts.drawn(subject, interleavings)
    counts.stages += sum(len(s.stages) for s in schedules(subject.model))
    counts.ops += subject.device.executed
    counts.poisoned += subject.device.memory.poisoned
    if wrong:
        counts.found.append(f"{net}\n{choice}\n{loop}\ninterleavings that differ: {wrong}")


_ERRORS = (RuntimeError, LookupError, NameError, AttributeError, TypeError, AssertionError)


def looked_at(case: Callable[[], list[str]]) -> list[str] | str:
    """What is wrong in a case, or the error that it raises."""
    try:
        return case()
    except _ERRORS:
        return traceback.format_exc()


def prove(
    cases: int,
    seed: int,
    interleavings: int,
    *,
    shrink: bool = False,
    features: tuple[str, ...] = loops.FEATURES,
) -> Counts:
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
    @hypothesis.given(loops.cases(features), st.integers(0, 2**30))
    def one(case: tuple[Net, Choice, Loop], first: int) -> None:
        if counts.cases >= cases:
            return
        check(*case, interleavings, first, counts)
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
    schedules: int = 0
    false_alarms: int = 0
    missed: list[str] = dataclasses.field(default_factory=list)
    step: Mutants | None = None  # of updates, and of edges between graphs
    edits: collections.Counter[tuple[str, bool]] = dataclasses.field(  # name of the edit, harmful
        default_factory=collections.Counter
    )

    def count(self, verdict: Verdict, reported: bool, edits: str, name: str = "") -> None:
        """One more."""
        harmful = verdict.harm in (Harm.WRONG, Harm.CRASH)
        self.judged[verdict.harm, reported] += 1
        self.edits[name, harmful] += 1
        if harmful and not reported:
            self.missed.append(f"missed: {verdict.graph}: {edits} ({verdict.why})")

    def of(self, *harms: Harm, reported: bool) -> int:
        return sum(self.judged[harm, reported] for harm in harms)

    def __str__(self) -> str:
        text = (
            f"{self.schedules} unmodified schedules, {self.false_alarms} false alarms\n"
            f"{self._table('mutants')}"
        )
        if self.step is not None:
            text += f"\n{self.step._table('mutants of updates and of edges between graphs')}"
            text += "".join(f"\n{line}" for line in self.step._by_edit())
        return text

    def _table(self, what: str) -> str:
        harmful = (Harm.WRONG, Harm.CRASH)
        wrong, crash = (self.of(harm, reported=True) for harm in harmful)
        return (
            f"{sum(self.judged.values())} {what}\n"
            f"  harmful, caught: {wrong + crash} ({wrong} that give wrong results, {crash} that "
            "raise)\n"
            f"  harmful, missed: {self.of(*harmful, reported=False)}\n"
            f"  harmless, flagged: {self.of(Harm.NONE, reported=True)}\n"
            f"  harmless, passed: {self.of(Harm.NONE, reported=False)}\n"
            f"  with too many interleavings to decide: "
            f"{self.of(Harm.UNDECIDED, reported=True)} flagged, "
            f"{self.of(Harm.UNDECIDED, reported=False)} passed"
        )

    def _by_edit(self) -> Iterator[str]:
        yield "  edit                      harmful  harmless"
        for name in sorted({name for name, _ in self.edits}):
            yield f"  {name:24}{self.edits[name, True]:9}{self.edits[name, False]:10}"


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
        # see tests/test_disk_*pass.py
        choice = dataclasses.replace(choice, disk=False, disk_weights=False, disk_saved=False)
        choice = dataclasses.replace(choice, offload=False, on_host=0)
        subject = Subject(net, choice, Counts())
        subject.wrong(InOrder())
        graphs = inside.streamed(subject.model).graphs
        programs = [p for graph in graphs for p in graph.programs.values() if p is not None]
        found.extend(e.schedule for p in programs for e in p.executors.values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one()
    return found


def planned_schedules(count: int, seed: int) -> list[Schedule]:
    """`count` schedules that the passes make for random models and plans; none of them is run.

    Their code is not compiled, so they have what is only made with Inductor, too: norms, and
    updates on the device.
    """
    found: list[Schedule] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2 * count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(nets.nets(), st.integers(0, 2**30))
    def one(net: Net, chosen: int) -> None:
        if len(found) >= count or plain_refuses(net, Choice()):
            return
        rng = random.Random(chosen)
        inputs: dict[str, Any] = {**nets.data(net, 0)}
        captured = capture(nets.build(net), **inputs)
        for _ in range(2):  # tracing takes most of the time
            found.append(captured.build(**_plan(rng, len(captured.units))))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one()
    return found


def _plan(rng: random.Random, buckets: int) -> dict[str, Any]:
    """Options of the passes."""
    update = rng.random() < 0.25
    lookahead = rng.randint(1, 3)
    resident = {key for key in range(buckets) if rng.random() < 0.2}
    on_host = rng.choice((0.0, 0.0, 0.5))
    return {
        "accumulate": rng.random() < 0.35,
        "keep_last": rng.random() < 0.7,
        "reuse": rng.random() < 0.4,
        "lookahead": lookahead,
        "slots": lookahead + 1 + rng.randint(0, 2),
        "update": update,
        "masters": update and rng.random() < 0.3,
        "norms": rng.random() < 0.5,
        "device_update": 0.0 if update else rng.choice((0.0, 0.3, 0.6, 1.0)),
        "resident": frozenset(resident),
        "helps": rng.random() < 0.5,
        "state_delay": rng.choice((1, 1, 2)),
        "rerun": rng.choice((0, 0, 1, 9)),
        "activations": rng.choice(("auto", "offload")),
        "disk_saved": rng.random() < 0.5,
        "on_disk": frozenset(key for key in range(buckets) if rng.random() < 0.3),
        "saved_on_host": frozenset(i for i in range(12) if rng.random() < on_host),
    }


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
            reuse=rng.random() < 0.4,
            random=some(stages),
            keep=some(stages),
            changes=some(stages),
            update=rng.random() < 0.3,
            masters=rng.random() < 0.3,
        )
        norms = rng.random() < 0.3
        buckets = frozenset() if spec.update else some(stages)
        found.append(
            build(
                dataclasses.replace(
                    spec,
                    norms=norms,
                    late=spec.shared and not spec.update and rng.random() < 0.5,
                    device=buckets,
                    resident=some(stages) - buckets,
                    helps=rng.random() < 0.5,
                )
            )
        )
    return found


def prove_verify(
    mutants: int, seed: int, originals: list[Schedule], *, of_steps: int = 0
) -> Mutants:
    """Judge the originals, `mutants` mutants of them, and `of_steps` of updates and edges."""
    counts = Mutants(collections.Counter(), schedules=len(originals))
    truths = []
    for schedule in originals:
        counts.false_alarms += bool(hazards(schedule))
        truths.append(Truth(schedule))
    rng = random.Random(seed)
    for _ in range(mutants):
        truth = rng.choice(truths)
        mutant, edits = mutate(truth.schedule, rng)
        counts.count(truth.judge(mutant), bool(hazards(mutant)), edits)
    counts.step = Mutants(collections.Counter())
    stepping = [truth for truth in truths if truth.schedule.backward is not None]
    for _ in range(of_steps):
        truth = rng.choice(stepping)
        mutant, name, edits = mutants_step.mutate(truth.schedule, rng)
        verdict = truth.judge(mutant, alone=False)
        counts.step.count(verdict, bool(hazards(mutant)), edits, name)
    counts.missed += counts.step.missed
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
    parser.add_argument(
        "--features", default=",".join(loops.FEATURES), help="of the loops that are drawn"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    start = time.perf_counter()
    failed = False
    features = tuple(filter(None, args.features.split(",")))
    if unknown := set(features) - {*loops.FEATURES}:
        parser.error(f"--features: {unknown} are none of {loops.FEATURES}")
    if args.cases:
        interleavings, shrink = args.interleavings, args.shrink
        counts = prove(args.cases, args.seed, interleavings, shrink=shrink, features=features)
        print("\n".join([*counts.found, str(counts)]))
        failed |= counts.mismatches > 0
    if args.mutants:
        third = args.schedules // 3
        originals = real_schedules(third, args.seed) + planned_schedules(third, args.seed)
        originals += hand_made(args.schedules - len(originals), args.seed)
        found = prove_verify(args.mutants, args.seed, originals, of_steps=args.mutants)
        print("\n".join([*found.missed, str(found)]))
        failed |= bool(found.missed) or found.false_alarms > 0
    print(f"{time.perf_counter() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
