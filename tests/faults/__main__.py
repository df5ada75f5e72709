"""Plant the faults of the list, one at a time, and say which test catches each.

First, one run of the suite with probes tells which tests reach each fault; the map is kept in a
file. Then each fault is planted in a copy of the tree, and the tests that reach it are run, the
cheapest first, until one fails. A test that fails without the fault too is left out.

    python -m tests.faults --map /tmp/map.json --json /tmp/faults.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.faults.fault import check
from tests.faults.listed import FAULTS
from tests.faults.tree import Tree
from tests.faults.trial import Map, Result, trial


def _results(path: Path | None) -> dict[str, Result]:
    if path is None or not path.exists():
        return {}
    return {each["fault"]: Result.of(each) for each in json.loads(path.read_text())}


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
    root = Path.cwd()
    check(FAULTS, root)
    faults = [f for f in FAULTS if re.search(options.only, f"{f.id} {f.path}")]
    if options.map.exists():
        reach = Map.read(options.map)
    else:
        reach = Map.make(options.map, root, FAULTS, options.workers)
    unreached = sum(not tests for tests in reach.reached.values())
    print(
        f"{len(reach.times_s)} tests ({sum(reach.times_s.values()):.0f} s of one core);"
        f" {len(reach.failed)} fail without a fault; no test reaches {unreached} faults"
    )
    if missing := [fault.id for fault in faults if fault.id not in reach.reached]:
        sys.exit(f"{options.map} lacks the faults {', '.join(missing)}: make it again")
    results, caught_by = _results(options.json), _results(options.first)
    tree, sound = Tree(root), dict[str, bool]()
    try:
        for fault in faults:
            if fault.id in results:
                continue
            first = caught_by[fault.id].test if fault.id in caught_by else ""
            found = trial(fault, tree, reach, sound, limit_s=options.limit, first=first)
            results[fault.id] = found
            print(f"{fault.id}: {found.end} {found.test} ({found.ran} tests, {found.time_s:.0f} s)")
            if options.json:
                new = options.json.with_name(options.json.name + ".new")
                new.write_text(json.dumps([asdict(each) for each in results.values()], indent=1))
                new.replace(options.json)
    finally:
        tree.close()
    survivors = [fault for fault in faults if not results[fault.id].end.caught]
    for fault in survivors:
        found = results[fault.id]
        how = f"{found.end}; {found.reached} tests reach it, {found.ran} were run"
        print(f"{fault.id} ({fault.path}): {how}\n    {fault.wrong}")
    ends = Counter(results[fault.id].end for fault in faults)
    counts = ", ".join(f"{count} {end}" for end, count in ends.items())
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults caught ({counts})")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
