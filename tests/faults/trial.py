"""The trial of one fault: the tests that reach it are run until one fails. And the map that says
which do, from one run of the suite.
"""

from __future__ import annotations

import enum
import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.fault import Fault, probed
from tests.faults.tree import Run, Tree

_FIRST_BATCH_S = 5.0  # CPU seconds of tests in the first batch: what starting pytest takes
_GROWTH = 4.0  # of each batch over the one before
_PATIENCE = 8.0  # a run that takes so many times what its tests took, and a start, hangs
_START_S = 60.0


@dataclass(frozen=True)
class Map:
    """Which tests reach each fault.

    Args:
        times_s: CPU seconds of each test that passes, in the order of the run.
        failed: tests that fail without a fault; they are left out.
        reached: the tests of each fault.
    """

    times_s: dict[str, float]
    failed: list[str]
    reached: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Map:
        return cls(**json.loads(path.read_text()))

    @classmethod
    def make(cls, path: Path, root: Path, faults: Sequence[Fault], workers: int) -> Map:
        """Run the suite once, with probes, and write the map to a file."""
        tree = Tree(root)
        try:
            for name, group in itertools.groupby(sorted(faults, key=_path), key=_path):
                tree.write(name, probed(tree.read(name), list(group)))
            run = tree.pytest(["-n", str(workers), "--dist", "worksteal", "tests"])
        finally:
            tree.close()
        failed = sorted(set(run.tests("failed")))
        passed = set(run.tests("passed")) - set(failed)
        assert passed, f"no test passes with the probes:\n{run.output}"
        ran = [note for note in run.notes if note["what"] == "ran" and note["test"] in passed]
        users: dict[str, list[str]] = defaultdict(list)
        for note in ran:
            for name in note["fixtures"]:
                users[name].append(note["test"])
        reached: dict[str, set[str]] = {fault.id: set() for fault in faults}
        for note in run.notes:
            if note["what"] == "reached":
                base, _, name = note["fixture"].rpartition("|")
                relying = [test for test in users[name] if test.startswith(base)] if name else []
                reached[note["fault"]].update([note["test"]], relying)
        times_s = {note["test"]: note["time_s"] for note in ran}
        made = cls(times_s, failed, {name: sorted(tests) for name, tests in reached.items()})
        path.write_text(json.dumps(asdict(made)))
        return made

    def candidates(self, fault: Fault) -> tuple[list[str], list[str]]:
        """The tests that may catch a fault, the cheapest first: those that reach it, then others of
        the same files, which use what a helper has cached. A fault that only an import reaches may
        be caught by any."""
        reaching = {test for test in self.reached[fault.id] if test in self.times_s}
        files = set(map(_file, reaching))
        others = {test for test in self.times_s if _file(test) in files} - reaching
        if not reaching and "" in self.reached[fault.id]:
            others = set(self.times_s)

        def cost(test: str) -> tuple[float, str]:
            return self.times_s[test], test

        return sorted(reaching, key=cost), sorted(others, key=cost)

    def batches(self, tests: Sequence[str]) -> Iterator[list[str]]:
        """Tests in batches of growing cost; in a batch, those of one file together."""
        size_s, batch, cost_s = _FIRST_BATCH_S, list[str](), 0.0
        for test in tests:
            if batch and cost_s + self.times_s[test] > size_s:
                yield sorted(batch, key=_file)
                size_s, batch, cost_s = size_s * _GROWTH, [], 0.0
            batch.append(test)
            cost_s += self.times_s[test]
        if batch:
            yield sorted(batch, key=_file)


def _path(fault: Fault) -> str:
    return fault.path


def _file(test: str) -> str:
    return test.partition("::")[0]


class End(enum.StrEnum):
    FAILED = "failed"  # a test failed
    CRASHED = "crashed"  # the process of the tests died
    HUNG = "hung"
    SURVIVED = "survived"
    UNREACHED = "unreached"  # no test comes there
    UNFINISHED = "unfinished"  # the time was over before all tests were run

    @property
    def caught(self) -> bool:
        return self in (End.FAILED, End.CRASHED, End.HUNG)


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Args:
        test: that caught it.
        reached: so many tests reach it.
        ran: so many tests were run.
    """

    fault: str
    end: End
    test: str = ""
    reached: int = 0
    ran: int = 0
    time_s: float = 0.0  # wall time

    @staticmethod
    def of(entry: dict[str, Any]) -> Result:
        return Result(**entry | {"end": End(entry["end"])})


def trial(
    fault: Fault, tree: Tree, reach: Map, sound: dict[str, bool], *, limit_s: float, first: str = ""
) -> Result:
    """Plant `fault` in `tree`, run tests until one fails, and take the fault back.

    Args:
        sound: which tests pass without a fault; one that caught a fault is run without it too.
        limit_s: no further batch begins after so many seconds.
        first: the test that is tried first, if there is such a one.
    """
    began, ran = time.monotonic(), 0
    reaching, others = reach.candidates(fault)

    def result(end: End, test: str = "") -> Result:
        return Result(fault.id, end, test, len(reaching), ran, round(time.monotonic() - began, 1))

    def run(tests: list[str], hang_s: float) -> Run:
        source = tree.faulty(fault)
        try:
            files = list(dict.fromkeys(map(_file, tests)))
            return tree.pytest(["-x", *files], tests=tests, limit_s=hang_s)
        finally:
            tree.write(fault.path, source)

    if not reaching and not others:
        return result(End.UNREACHED)
    known = [[first]] if first in reach.times_s else []
    for batch in [*known, *reach.batches(reaching), *reach.batches(others)]:
        left = [test for test in batch if sound.get(test, True)]
        while left:
            if time.monotonic() - began > limit_s:
                return result(End.UNFINISHED)
            crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # processes of a core
            hang_s = crowd * (_START_S + _PATIENCE * sum(reach.times_s[t] for t in left))
            batch_run = run(left, hang_s)
            started = batch_run.tests("started")
            ran += len(started)
            end, test = _end(batch_run)
            if not end.caught:
                break
            suspect = test if "::" in test else left[0]  # a file does not import
            # alone too: one that fails after others may fail after them without the fault
            alone = end is not End.FAILED or len(started) < 2
            if alone or _end(run([suspect], hang_s))[0].caught:
                if suspect not in sound:
                    without = tree.pytest([_file(suspect)], tests=[suspect], limit_s=hang_s)
                    sound[suspect] = without.code == 0
                if sound[suspect]:
                    return result(end, test)
            left = [each for each in left if each not in started and each != suspect]
    return result(End.SURVIVED)


def _end(run: Run) -> tuple[End, str]:
    last = (run.tests("started") or [""])[-1]
    if run.code is None:
        return End.HUNG, last
    if failed := run.tests("failed"):
        return End.FAILED, failed[0]
    return (End.SURVIVED, "") if run.code in (0, 5) else (End.CRASHED, last)
