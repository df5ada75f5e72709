"""A few cases of `python -m tests.budgets`: each runs or is refused, and a fault is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.budgets import Case

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks, and limits a child's memory"
)
ROOT = Path(__file__).resolve().parent.parent


def command(tmp_path: Path, *arguments: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own, which has no threads when it forks."""
    code = f"{first}\nimport sys\nfrom tests import budgets\nsys.exit(budgets.main(sys.argv[1:]))"
    whole = [sys.executable, "-c", code, *arguments, "--folder", str(tmp_path)]
    return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_each_runs_or_is_refused(tmp_path: Path) -> None:
    done = command(tmp_path, "--cases", "3", "--scale", "4", "--seed", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("3 cases: ") and "FAULT" not in done.stdout
    assert " ran" in done.stdout and "0 killed" in done.stdout


def test_plans_that_count_too_little_are_found(tmp_path: Path) -> None:
    """As if gradients were free: a budget that the plan meets is passed by the run."""
    lie = (
        "from megacompile.cost import memory\n"
        "memory.flat_bytes = lambda bucket, indices, item_of: 0\n"
    )
    done = command(tmp_path, "--cases", "1", "--scale", "4", "--seed", "2", first=lie)
    assert done.returncode == 1 and "FAULT" in done.stdout, done.stdout + done.stderr


def test_a_case_that_is_killed_is_a_fault(tmp_path: Path) -> None:
    kill = (
        "import os, signal\n"
        "from tests import budgets as b\n"
        "b.trial = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "b.warm_up = lambda *_: None\n"
    )
    done = command(tmp_path, "--cases", "1", "--scale", "4", first=kill)
    assert done.returncode == 1 and "FAULT" in done.stdout, done.stdout + done.stderr
    assert "1 killed" in done.stdout


def test_cases_differ() -> None:
    cases = [Case.draw(seed) for seed in range(40)]
    assert len({case.optimizer for case in cases}) == 3
    assert any(case.disk_weights for case in cases) and any(case.in_backward for case in cases)
    assert any("int8" in case.options.values() for case in cases)
    assert all(case == Case.draw(case.seed) for case in cases)
