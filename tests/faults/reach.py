"""The map: which tests reach each fault, and what each test takes. One run of the suite."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.faults.fault import Fault, probed
from tests.faults.tree import Run, Tree


@dataclass(frozen=True)
class Map:
    """What the probes noted.

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

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    def candidates(self, fault: Fault) -> tuple[list[str], list[str]]:
        """The tests that may catch a fault, the cheapest first: those that reach it, then others.

        The others are of the same files: what a helper has cached for one test, another one uses
        without a probe. A fault that only an import reaches may be caught by any test.
        """
        reaching = {test for test in self.reached[fault.id] if test in self.times_s}
        files = {test.partition("::")[0] for test in reaching}
        others = {test for test in self.times_s if test.partition("::")[0] in files} - reaching
        if not reaching and "" in self.reached[fault.id]:
            others = set(self.times_s)
        return self._cheapest(reaching), self._cheapest(others)

    def _cheapest(self, tests: Iterable[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self.times_s[test], test))


def make_map(
    root: Path,
    faults: Sequence[Fault],
    suite: Sequence[str],
    *,
    workers: int = 1,
    limit_s: float | None = None,
) -> Map:
    """Run the suite once, with probes.

    Args:
        limit_s: the run is stopped then, and the map has the tests that were run.
    """
    tree = Tree(root)
    try:
        for path, group in itertools.groupby(sorted(faults, key=_path), key=_path):
            tree.write(path, probed(tree.read(path), list(group)))
        parallel = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        run = tree.pytest([*parallel, *suite], limit_s=limit_s)
        failed = sorted({test for test in run.tests("failed")})
        if not run.tests("passed"):
            raise SystemExit(f"no test passes with the probes:\n{run.output}")
        return _mapped(run, faults, set(failed))
    finally:
        tree.close()


def _path(fault: Fault) -> str:
    return fault.path


def _mapped(run: Run, faults: Sequence[Fault], failed: set[str]) -> Map:
    passed = set(run.tests("passed")) - failed
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
    return Map(times_s, sorted(failed), {name: sorted(tests) for name, tests in reached.items()})
