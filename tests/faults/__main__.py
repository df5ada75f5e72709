"""Plant the faults of the list, one at a time, and say which test catches each.

First, one run of the suite with probes tells which tests reach each fault; the map is kept in a
file. Then each fault is planted in a copy of the tree, and the tests that reach it are run, the
cheapest first, until one fails. A test that fails without the fault too is left out.

    python -m tests.faults --map /tmp/map.json --json /tmp/faults.json
"""

from __future__ import annotations

import argparse
import queue
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults import report
from tests.faults.fault import Fault, check
from tests.faults.listed import FAULTS
from tests.faults.reach import Map, make_map
from tests.faults.tree import Tree
from tests.faults.trial import Result, Sound, trial


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--map", type=Path, required=True, help="read, or made if not there")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="faults whose id or path has it"
    )
    parser.add_argument(
        "--suite", nargs="+", default=["tests"], metavar="PATH", help="of the tests"
    )
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    parser.add_argument("--workers", type=int, default=2, help="processes of the run with probes")
    parser.add_argument(
        "--map-limit", type=float, metavar="SECONDS", help="stop mapping then, with a part"
    )
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="for a fault")
    parser.add_argument("--json", type=Path, help="results, written after each fault")
    parser.add_argument(
        "--continue", type=Path, dest="earlier", metavar="FILE", help="go on with these results"
    )
    parser.add_argument(
        "--first", type=Path, metavar="FILE", help="try what caught a fault in these results first"
    )
    parser.add_argument("--root", type=Path, default=Path(), help="the tree to copy")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--map-only", action="store_true", help="make the map, and no more")
    return parser


def run(
    faults: Sequence[Fault],
    reach: Map,
    root: Path,
    done: list[Result],
    caught_by: Mapping[str, str],
    *,
    jobs: int,
    limit_s: float,
    out: Path | None,
) -> list[Result]:
    """Try all faults that are not done. Each job has a copy of the tree."""
    trees: queue.Queue[Tree] = queue.Queue()
    copies = [Tree(root) for _ in range(jobs)]
    sound, lock = Sound(), threading.Lock()
    results, known = list(done), {result.fault for result in done}
    for copy in copies:
        trees.put(copy)

    def one(fault: Fault) -> None:
        tree = trees.get()
        try:
            result = trial(
                fault, tree, reach, sound, limit_s=limit_s, first=caught_by.get(fault.id, "")
            )
        finally:
            trees.put(tree)
        with lock:
            results.append(result)
            print(report.line(result), flush=True)
            if out:
                report.write(out, results)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, [fault for fault in faults if fault.id not in known]))
    finally:
        for copy in copies:
            copy.close()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    root: Path = options.root.resolve()
    check(FAULTS, root)
    faults = [f for f in FAULTS if re.search(options.only, f"{f.id} {f.path}")]
    if options.list:
        for fault in faults:
            print(f"{fault.id} ({fault.path}): {fault.wrong}")
        return 0
    if options.map.exists():
        reach = Map.read(options.map)
    else:
        reach = make_map(
            root, FAULTS, options.suite, workers=options.workers, limit_s=options.map_limit
        )
        reach.write(options.map)
    unreached = sum(not tests for tests in reach.reached.values())
    print(
        f"{len(reach.times_s)} tests ({sum(reach.times_s.values()):.0f} s of one core);"
        f" {len(reach.failed)} fail without a fault; no test reaches {unreached} faults"
    )
    if missing := [fault.id for fault in faults if fault.id not in reach.reached]:
        sys.exit(f"{options.map} lacks the faults {', '.join(missing)}: make it again")
    if options.map_only:
        return 0
    done = report.read(options.earlier) if options.earlier else []
    caught = report.read(options.first) if options.first else []
    results = run(
        faults,
        reach,
        root,
        done,
        {result.fault: result.test for result in caught},
        jobs=options.jobs,
        limit_s=options.limit,
        out=options.json or options.earlier,
    )
    names = {fault.id for fault in faults}
    results = [result for result in results if result.fault in names]
    print(report.table(faults, results), report.survivors(faults, results), sep="\n\n")
    print(report.summary(results))
    return int(not all(result.end.caught for result in results))


if __name__ == "__main__":
    sys.exit(main())
