"""A few cases of `python -m tests.budgets`: each runs or is refused, and a fault is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits a child's memory")

LIES = {  # code that is run first: what `python -m tests.budgets` says then
    "": "0 killed",
    # as if gradients and states were free: a budget that the plan meets is passed by the run
    "from megacompile.cost import places\nplaces.flat_bytes = lambda *_: 0": "FAULT",
}


@linux
@pytest.mark.thorough
@pytest.mark.parametrize("lie", LIES)
def test_each_runs_or_is_refused(tmp_path: Path, lie: str) -> None:
    """In a process of its own, which has no threads when it forks."""
    code = f"{lie}\nimport sys\nfrom tests import budgets\nsys.exit(budgets.main(sys.argv[1:]))"
    cases = ["--cases", "1" if lie else "3", "--scale", "4", "--seed", "2" if lie else "0"]
    whole = [sys.executable, "-c", code, *cases, "--folder", str(tmp_path)]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == bool(lie), done.stdout + done.stderr
    assert LIES[lie] in done.stdout and ("FAULT" in done.stdout) == bool(lie)


@linux
def test_cases_differ() -> None:
    from tests.budgets import Case

    cases = [Case.draw(seed) for seed in range(40)]
    assert len({case.optimizer for case in cases}) == 3
    assert any(case.disk_weights for case in cases) and any(case.in_backward for case in cases)
    assert any("int8" in case.options.values() for case in cases)
    assert all(case == Case.draw(case.seed) for case in cases)
