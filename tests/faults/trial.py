"""The trial of one fault: the tests that reach it are run until one fails."""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.fault import Fault
from tests.faults.reach import Map
from tests.faults.tree import Run, Tree

_FIRST_BATCH_S = 5.0  # CPU seconds of tests in the first batch: what starting pytest takes
_GROWTH = 4.0  # of each batch over the one before
_PATIENCE = 8.0  # a run that takes so many times what its tests took, and a start, hangs
_START_S = 60.0


class End(enum.Enum):
    """How a fault ended."""

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

    @property
    def tier(self) -> str:
        """The folder of the test that caught it."""
        folders = self.test.partition("::")[0].split("/")[1:-1]
        return folders[0] if folders else "tests"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"end": self.end.value}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Result:
        return cls(**entry | {"end": End(entry["end"])})


class Sound:
    """Which tests pass without a fault. A test that caught one is run once more without it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: dict[str, bool] = {}

    def check(self, tree: Tree, test: str, limit_s: float) -> bool:
        """Whether `test` passes in `tree`, which has no fault now."""
        with self._lock:
            known = self._passes.get(test)
        if known is None:
            run = tree.pytest([_file(test)], tests=[test], limit_s=limit_s)
            known = run.code == 0
            with self._lock:
                self._passes[test] = known
        return known

    def fails(self, test: str) -> bool:
        with self._lock:
            return not self._passes.get(test, True)


def _file(test: str) -> str:
    return test.partition("::")[0]


def batches(tests: Sequence[str], reach: Map) -> Iterator[list[str]]:
    """Tests in batches of growing cost; in a batch, those of one file together."""
    size_s, batch, cost_s = _FIRST_BATCH_S, list[str](), 0.0
    for test in tests:
        if batch and cost_s + reach.times_s[test] > size_s:
            yield sorted(batch, key=_file)
            size_s, batch, cost_s = size_s * _GROWTH, [], 0.0
        batch.append(test)
        cost_s += reach.times_s[test]
    if batch:
        yield sorted(batch, key=_file)


def trial(
    fault: Fault, tree: Tree, reach: Map, sound: Sound, *, limit_s: float, first: str = ""
) -> Result:
    """Plant `fault` in `tree`, run tests until one fails, and take the fault back.

    Args:
        limit_s: no further batch begins after so many seconds.
        first: the test that is tried first, if there is such a one.
    """
    began, ran = time.monotonic(), 0
    reaching, others = reach.candidates(fault)

    def result(end: End, test: str = "") -> Result:
        return Result(fault.id, end, test, len(reaching), ran, round(time.monotonic() - began, 1))

    if not reaching and not others:
        return result(End.UNREACHED)

    def run(tests: list[str], hang_s: float) -> Run:
        source = tree.faulty(fault)
        try:
            files = list(dict.fromkeys(map(_file, tests)))
            return tree.pytest(["-x", *files], tests=tests, limit_s=hang_s)
        finally:
            tree.write(fault.path, source)

    known = [[first]] if first in reach.times_s else []
    for batch in [*known, *batches(reaching, reach), *batches(others, reach)]:
        left = [test for test in batch if not sound.fails(test)]
        while left:
            if time.monotonic() - began > limit_s:
                return result(End.UNFINISHED)
            hang_s = _crowd() * (_START_S + _PATIENCE * sum(reach.times_s[t] for t in left))
            batch_run = run(left, hang_s)
            started = batch_run.tests("started")
            ran += len(started)
            end, test = _end(batch_run)
            if not end.caught:
                break
            suspect = test if "::" in test else left[0]  # a file does not import
            # alone too: one that fails after others may fail after them without the fault
            alone = (
                end is not End.FAILED or len(started) < 2 or _end(run([suspect], hang_s))[0].caught
            )
            if alone and sound.check(tree, suspect, hang_s):
                return result(end, test)
            left = [each for each in left if each not in started and each != suspect]
    return result(End.SURVIVED)


def _crowd() -> float:
    """How many processes share a core: a wait takes as much longer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _end(run: Run) -> tuple[End, str]:
    """How a run of pytest ended, and in which test."""
    last = (run.tests("started") or [""])[-1]
    if run.code is None:
        return End.HUNG, last
    if failed := run.tests("failed"):
        return End.FAILED, failed[0]
    return (End.SURVIVED, "") if run.code in (0, 5) else (End.CRASHED, last)
