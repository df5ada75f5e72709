"""The proof, as a command: random models, plans and programs; mutants of schedules.

    python -m tests.prove --cases 2000 --seed 0      random models against the plain ones
    python -m tests.prove --ranks 200 --seed 0       models that ranks share, against plain ranks
    python -m tests.prove --frames 2000 --seed 0     programs of frames, against the plain ones
    python -m tests.prove --mutants 1000 --seed 0    broken schedules against `verify`

A case is one interleaving of one plan of one model, whose losses, outputs, gradients, parameters
and buffers must be those of the plain model in every bit. Where the backward makes the optimizer's
update, they must be those of program order, and within 1e-5 of the plain loop. Interleavings share
models and plans, because tracing takes most of the time. Users' loops: `tests/stateful`. With
`--cases`, a tenth as many cases are of simulated ranks, and as many programs of frames
(`tests.frames`).

A mutant is a schedule of `tests.mutants` with one or two edits of `tests.mutants`, which decides
by interleavings whether it is harmful, or of updates and the edges between graphs
(`tests.mutants_step`).
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
from collections.abc import Callable

import hypothesis
import torch
from hypothesis import strategies as st

from megacompile import schedules
from megacompile.ir.schedule import Schedule
from megacompile.verify.proof import HazardKind, hazards
from tests.draws import examples
from tests.frames import command as frames
from tests.mutants import Harm, Truth, lined, planned
from tests.mutants_step import mutate
from tests.subject import Case, Counts, Subject, alone, plain_refuses, shared


def check(case: Case, interleavings: int, seed: int, counts: Counts) -> None:
    """Some cases of one model and plan; mismatches are counted, not raised."""
    if plain_refuses(case.net, case.choices[0]):
        counts.more["drawn models that the plain loop refuses"] += 1
        hypothesis.reject()
    before = counts.cases
    subject = Subject(case, counts)
    found = examine(subject, range(seed, seed + interleavings))
    if case.count > 1:
        counts.more[f"cases of {case.count} ranks"] += counts.cases - before
    counts.more["collectives"] += subject.interconnect.met
    counts.more["stages"] += sum(len(s.stages) for r in subject.ranks for s in schedules(r.model))
    counts.more["ops executed"] += sum(rank.device.executed for rank in subject.ranks)
    counts.more["times memory was poisoned"] += subject.poisoned
    if found:
        counts.found.append(f"{case}\ninterleavings that differ: {found}")


def examine(subject: Subject, seeds: range) -> dict[object, object]:
    """What is wrong in some interleavings, by seed; all are counted."""
    counts = subject.counts
    wrongs: dict[object, object] = {}
    if subject.rounds and (found := looked_at(subject.to_program_order)):
        wrongs["program order"] = found
        counts.mismatches += 1
    for k in seeds:
        found = looked_at(functools.partial(subject.random, k))
        counts.cases += 1
        counts.mismatches += bool(found)
        wrongs |= {k: found} if found else {}
        if isinstance(found, str):  # the model may be in chunks
            break
    counts.drawn(subject, len(seeds))
    return wrongs


_ERRORS = (
    *(RuntimeError, LookupError, NameError, AttributeError, TypeError, ValueError),
    AssertionError,
)


def looked_at(case: Callable[[], list[str]]) -> list[str] | str:
    """What is wrong in a case, or the error that it raises."""
    try:
        return case()
    except _ERRORS:
        return traceback.format_exc()


def prove(
    drawn: st.SearchStrategy[Case], cases: int, seed: int, interleavings: int, shrink: bool = False
) -> Counts:
    """Run some cases, alone or of ranks; with `shrink`, raise the smallest that differs."""
    counts = Counts()

    def one(case: Case, first: int) -> None:
        if counts.cases >= cases:
            return
        check(case, interleavings, first, counts)
        if shrink and counts.found:
            raise AssertionError(counts.found.pop())

    count = 2 * -(-cases // interleavings) + 10
    examples(one, drawn, st.integers(0, 2**30), count=count, seed=seed, shrink=shrink)
    return counts


@dataclasses.dataclass
class Mutants:
    """How `verify` judged mutants, and schedules that are right."""

    schedules: int = 0
    false_alarms: int = 0
    judged: collections.Counter[tuple[Harm, bool]] = dataclasses.field(  # harm, reported
        default_factory=collections.Counter
    )
    edits: collections.Counter[tuple[str, bool]] = dataclasses.field(  # name of the edit, harmful
        default_factory=collections.Counter
    )
    missed: list[str] = dataclasses.field(default_factory=list)
    # of each harmful mutant, what `verify` says
    kinds: list[frozenset[HazardKind]] = dataclasses.field(default_factory=list)

    def of(self, *harms: Harm, reported: bool) -> int:
        return sum(self.judged[harm, reported] for harm in harms)

    def __str__(self) -> str:
        harmful = (Harm.WRONG, Harm.CRASH)
        wrong, crash = (self.of(harm, reported=True) for harm in harmful)
        lines = [
            f"{self.schedules} unmodified schedules, {self.false_alarms} false alarms",
            f"{sum(self.judged.values())} mutants",
            f"  harmful, caught: {wrong + crash} ({wrong} give wrong results, {crash} raise)",
            f"  harmful, missed: {self.of(*harmful, reported=False)}",
            f"  harmless, flagged: {self.of(Harm.NONE, reported=True)}",
            f"  harmless, passed: {self.of(Harm.NONE, reported=False)}",
            "  edit                      harmful  harmless",
        ]
        for name in sorted({name for name, _ in self.edits}):
            lines.append(f"  {name:24}{self.edits[name, True]:9}{self.edits[name, False]:10}")
        return "\n".join(lines)


def prove_verify(mutants: int, seed: int, originals: list[Schedule]) -> Mutants:
    counts, rng = Mutants(schedules=len(originals)), random.Random(seed)
    for original in originals:
        if found := hazards(original):
            counts.false_alarms += 1
            counts.missed.append(f"false alarm on {original.name}: {found[0]}")
    truths = [Truth(original) for original in originals]
    for _ in range(mutants):
        truth = rng.choice(truths)
        mutant, name, edits = mutate(truth.schedule, rng)
        harm, why = truth.judge(mutant)
        kinds = frozenset(hazard.kind for hazard in hazards(mutant))
        harmful = harm is not Harm.NONE
        counts.judged[harm, bool(kinds)] += 1
        counts.edits[name, harmful] += 1
        counts.kinds += [kinds] if harmful else []
        if harmful and not kinds:
            counts.missed.append(f"missed: {edits} ({why})")
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prove", description=__doc__)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--ranks", type=int, help="cases of ranks; default: a tenth of --cases")
    parser.add_argument("--frames", type=int, help="programs; default: a tenth of --cases")
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
    ranks = args.cases // 10 if args.ranks is None else args.ranks
    for name, drawn, cases in (("", alone(), args.cases), ("ranks: ", shared(), ranks)):
        if cases:
            counts = prove(drawn, cases, args.seed, args.interleavings, shrink=args.shrink)
            print("\n".join([*counts.found, f"{name}{counts}"]))
            failed |= counts.mismatches > 0
    programs = args.cases // 10 if args.frames is None else args.frames
    if programs:
        of_frames = frames.prove(args.seed, range(programs))
        print(f"frames: {of_frames}")
        failed |= of_frames.mismatches > 0
    if args.mutants:
        half = args.schedules // 2
        originals = planned(half, args.seed) + lined(args.schedules - half, args.seed)
        found = prove_verify(args.mutants, args.seed, originals)
        print("\n".join([*found.missed, str(found)]))
        failed |= bool(found.missed) or found.false_alarms > 0
    print(f"{time.perf_counter() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
