"""Plant the faults of the list, one at a time, and say which test catches each.

First, one run of the suite with probes tells which tests reach each fault; the map is kept in a
file. Then each fault is planted in a copy of the tree, and the tests that reach it are run, the
cheapest first, until one fails. A test that fails without the fault too is left out.

    python -m tests.faults --map /tmp/map.json --json /tmp/faults.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.fault import Fault, check, probed
from tests.faults.listed import FAULTS
from tests.faults.tree import Run, Tree

CAUGHT = ("failed", "crashed")  # a test failed; the process of the tests died, or a test hung


@dataclass(frozen=True)
class Map:
    """Which tests reach each fault.

    Args:
        times_s: seconds of each test that passes.
        failed: tests that fail without a fault; they are left out.
        reached: the tests of each fault; "": an import.
    """

    times_s: dict[str, float]
    failed: list[str]
    reached: dict[str, list[str]]

    @classmethod
    def make(cls, root: Path, workers: int) -> Map:
        """Run the suite once, with probes."""
        tree = Tree(root)
        try:
            by_path = operator.attrgetter("path")
            for path, group in itertools.groupby(sorted(FAULTS, key=by_path), key=by_path):
                tree.write(path, probed((root / path).read_text(), list(group)))
            run = tree.pytest(["-n", str(workers), "--dist", "worksteal", "tests"])
        finally:
            tree.close()
        failed = sorted(set(run.tests("failed")))
        ran = [note for note in run.notes if note["what"] == "passed"]
        assert ran, f"no test passes with the probes:\n{run.output}"
        reached: defaultdict[str, set[str]] = defaultdict(set)
        for note in run.notes:
            if note["what"] == "reached":
                reached[note["fault"]].add(note["test"])
        found = {fault.id: sorted(reached[fault.id]) for fault in FAULTS}
        return cls({n["test"]: n["time_s"] for n in ran if n["test"] not in failed}, failed, found)

    def candidates(self, fault: Fault) -> list[str]:
        """The tests that may catch a fault: those that reach it, the cheapest first, then others of
        the same files, which use what a fixture or a helper has kept. A fault that only an import
        reaches may be caught by any."""
        reaching = {test for test in self.reached[fault.id] if test in self.times_s}
        files = {_file(test) for test in reaching}
        imported = not reaching and "" in self.reached[fault.id]
        wanted = [test for test in self.times_s if imported or _file(test) in files]
        return sorted(wanted, key=lambda test: (test not in reaching, self.times_s[test]))


def _file(test: str) -> str:
    return test.partition("::")[0]


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Args:
        end: one of `CAUGHT`; "survived"; "unreached": no test comes there; "unfinished": the time
            was over before all tests were run.
        test: that caught it.
        reached: so many tests may catch it.
        ran: so many tests were run.
        time_s: wall time.
    """

    fault: str
    end: str
    test: str = ""
    reached: int = 0
    ran: int = 0
    time_s: float = 0.0


def trial(fault: Fault, tree: Tree, reach: Map, limit_s: float, first: str) -> Result:
    """Plant a fault in `tree`, run tests until one fails, and take it back.

    Args:
        limit_s: for the run.
        first: the test that is tried first, if there is such a one.
    """
    began, ran = time.monotonic(), 0
    left = sorted(reach.candidates(fault), key=lambda test: test != first)
    count, end, test = len(left), "survived" if left else "unreached", ""
    while left:
        faulty = fault.planted((tree.root / fault.path).read_text())
        with tree.changed(fault.path, faulty):
            files = dict.fromkeys(map(_file, left))
            run = tree.pytest(["-x", *files], tests=left, limit_s=limit_s)
        started = run.tests("started")
        ran += len(started)
        end, test = _end(run)
        if end not in CAUGHT:
            break
        suspect = test if "::" in test else left[0]  # a file does not import
        without = tree.pytest([_file(suspect)], tests=[suspect], limit_s=limit_s)
        if without.code == 0:
            break
        end, test = "survived", ""
        left = [each for each in left if each not in started and each != suspect]
    return Result(fault.id, end, test, count, ran, round(time.monotonic() - began, 1))


def _end(run: Run) -> tuple[str, str]:
    if failed := run.tests("failed"):
        return "failed", failed[0]
    if run.code is None:
        return "unfinished", ""
    last = run.tests("started")[-1:]
    return ("survived", "") if run.code in (0, 5) else ("crashed", "".join(last))


def _results(path: Path | None) -> dict[str, Result]:
    if path is None or not path.exists():
        return {}
    return {each["fault"]: Result(**each) for each in json.loads(path.read_text())}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--map", type=Path, required=True, help="read, or made if not there")
    add("--only", default="", metavar="REGEX", help="faults whose id or path has it")
    add("--workers", type=int, default=2, help="processes of the run with probes")
    add("--limit", type=float, default=900.0, metavar="SECONDS", help="for a fault")
    add("--json", type=Path, help="results: goes on with these, and writes after each fault")
    add("--first", type=Path, metavar="FILE", help="results: try what caught a fault there first")
    options = parser.parse_args(arguments)
    check(FAULTS, Path.cwd())
    faults = [f for f in FAULTS if re.search(options.only, f"{f.id} {f.path}")]
    if not options.map.exists():
        options.map.write_text(json.dumps(asdict(Map.make(Path.cwd(), options.workers))))
    reach = Map(**json.loads(options.map.read_text()))
    print(
        f"{len(reach.times_s)} tests ({sum(reach.times_s.values()):.0f} s);"
        f" {len(reach.failed)} fail without a fault"
    )
    if missing := [fault.id for fault in faults if fault.id not in reach.reached]:
        sys.exit(f"{options.map} lacks the faults {', '.join(missing)}: make it again")
    results, caught_by = _results(options.json), _results(options.first)
    tree = Tree(Path.cwd())
    try:
        for fault in [each for each in faults if each.id not in results]:
            first = caught_by[fault.id].test if fault.id in caught_by else ""
            found = trial(fault, tree, reach, options.limit, first)
            results[fault.id] = found
            print(f"{fault.id}: {found.end} {found.test} ({found.ran} tests, {found.time_s:.0f} s)")
            if options.json:
                options.json.write_text(
                    json.dumps([asdict(each) for each in results.values()], indent=1)
                )
    finally:
        tree.close()
    ends = Counter(results[fault.id].end for fault in faults)
    for fault in faults:
        found = results[fault.id]
        if found.end not in CAUGHT:
            how = f"{found.end}; {found.ran} of {found.reached} tests were run"
            print(f"{fault.id} ({fault.path}): {how}\n    {fault.wrong}")
    caught = sum(ends[end] for end in CAUGHT)
    counts = ", ".join(f"{count} {end}" for end, count in ends.items())
    print(f"{caught} of {len(faults)} faults caught ({counts})")
    return int(caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
