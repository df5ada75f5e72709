"""Many cases, in several processes, and what they count."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch

from tests import frames
from tests.frames.case import Case, draw
from tests.frames.judge import EAGER, Setting, judge, shrink


@dataclass
class Counts:
    cases: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    drawn: collections.Counter[str] = field(default_factory=collections.Counter)
    found: dict[tuple[str, ...], tuple[int, int, str]] = field(default_factory=dict)

    @property
    def mismatches(self) -> int:
        return self.kinds["mismatch"]

    def add(self, number: int, case: Case, setting: Setting) -> None:
        verdict = judge(case, setting)
        self.cases += 1
        self.kinds[verdict.kind] += 1
        labels = case.labels()
        self.drawn.update(kind for kind, _ in case.parts)
        if verdict.kind != "mismatch":
            return
        key = next((k for k in self.found if labels.issuperset(k)), None)
        if key is None:
            small = shrink(case, setting)
            key = tuple(sorted(small.labels()))
            text = f"{small.text()}\n# {judge(small, setting).why.strip()}"
            if key not in self.found:
                self.found[key] = number, 0, text
        at, count, text = self.found[key]
        self.found[key] = at, count + 1, text

    def join(self, other: Counts) -> None:
        self.cases += other.cases
        self.kinds.update(other.kinds)
        self.drawn.update(other.drawn)
        for key, (at, count, text) in other.found.items():
            before = self.found.get(key, (at, 0, text))
            self.found[key] = (min(at, before[0]), before[1] + count, min(before, (at, 0, text))[2])

    def __str__(self) -> str:
        lines = [f"{self.cases} programs, {self.mismatches} mismatches"]
        lines += [f"  {count} {kind}" for kind, count in sorted(self.kinds.items())]
        lines += ["  parts drawn: " + ", ".join(f"{c} {k}" for k, c in sorted(self.drawn.items()))]
        lines += ["  mismatches   first case   parts of the smallest program"] if self.found else []
        for key, (at, count, _) in sorted(self.found.items(), key=lambda item: item[1][0]):
            lines.append(f"  {count:10} {at:12}   {' and '.join(key)}")
        return "\n".join(lines)


def numbered(seed: int, number: int, setting: Setting = EAGER) -> Case:
    case = draw(random.Random(f"{seed}/{number}"))
    if setting.rtol:  # an adversarial device is simulated, and its code eager
        case = dataclasses.replace(case, options=dataclasses.replace(case.options, device=-1))
    return case


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Without the time that Dynamo takes to say in its log how long guards take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0):
            yield
    finally:
        torch.set_num_threads(threads)


def prove(seed: int, numbers: range, setting: Setting = EAGER, *, tell: bool = False) -> Counts:
    counts = Counts()
    with quickly(), contextlib.ExitStack() as stack:
        for number in numbers:
            known = set(counts.found)
            counts.add(number, numbered(seed, number, setting), setting)
            for key in set(counts.found) - known if tell else ():
                print(f"--- case {number}\n{counts.found[key][2]}", flush=True)
            gc.collect()
            if not gc.get_freeze_count():  # what torch has made is much to look through
                gc.freeze()
                stack.callback(gc.unfreeze)
    return counts


def prove_in(jobs: int, cases: int, seed: int, setting: Setting) -> Counts:
    """The same in several processes; each takes every `jobs`-th case."""
    if jobs == 1:
        return prove(seed, range(cases), setting, tell=True)
    counts = Counts()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        shares = [range(job, cases, jobs) for job in range(jobs)]
        for each in pool.map(_share, [seed] * jobs, shares, [setting] * jobs):
            counts.join(each)
    for at, _, text in sorted(counts.found.values()):
        print(f"--- case {at}\n{text}")
    return counts


def _share(seed: int, numbers: range, setting: Setting) -> Counts:
    return prove(seed, numbers, setting)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frames", description=frames.__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    setting = Setting.of(args.lowering, args.device)
    start = time.perf_counter()
    if args.only is not None:
        case = numbered(args.seed, args.only, setting)
        with quickly():
            verdict = judge(case, setting)
        print(f"{case.text()}\n{verdict.kind}\n{verdict.why}")
        return int(verdict.kind == "mismatch")
    counts = prove_in(args.jobs, args.cases, args.seed, setting)
    taken = time.perf_counter() - start
    print(f"{counts}\n{taken:.0f} s, {counts.cases / taken:.1f} programs a second")
    return int(counts.mismatches > 0)
