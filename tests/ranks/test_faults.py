"""One rank does something else, or nothing: all ranks stop soon, and say which one and where.

The times are bounds on hanging: a rank that waits for another one by itself would wait for 30
minutes. Who is to blame when: `tests/unit/test_agreement.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.faults import CASES

ROOT = Path(__file__).resolve().parent.parent.parent
BOUND_S = 60.0  # from the fault to the error, by default
TIMEOUT_S = 500


def test_faults_stop_all_ranks(tmp_path: Path) -> None:
    check(run([name for name, case in CASES.items() if case.always], tmp_path))


@pytest.mark.thorough
def test_more_faults_stop_all_ranks(tmp_path: Path) -> None:
    check(run([name for name, case in CASES.items() if not case.always], tmp_path))


def run(cases: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of each case did."""
    command = [sys.executable, "-m", "tests.ranks.faults", str(folder), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "found.json").read_text())
    return found


def check(found: dict[str, list[dict[str, Any]]]) -> None:
    """The errors are the right ones, came soon, and nothing is left."""
    for name, ranks in found.items():
        case = CASES[name]
        for rank, facts in enumerate(ranks):
            where = f"{name}, rank {rank}: {facts}"
            if rank == len(ranks) - 1:
                assert facts["kind"] == case.odd, where
            elif facts["kind"] == "none":
                assert name == "is_killed_with_the_store", where
            elif name == "all_are_interrupted":
                assert facts["kind"] == "KeyboardInterrupt", where
            else:
                assert facts["kind"] == ("RankError" if case.others else ""), where
                assert re.search(case.others.format(rank=rank), facts["error"]), where
            assert facts.get("seconds", 0) < BOUND_S, where
            assert facts["ending_s"] < BOUND_S, where
            assert not Path(f"/proc/{facts['pid']}").exists(), where
    pids = [str(facts["pid"]) for ranks in found.values() for facts in ranks]
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared if any(pid in name.split("_") for pid in pids)]
