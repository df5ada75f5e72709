"""Trainer, Accelerate and Lightning under torchrun: two gloo processes, plain and megacompiled.

Those of the packages that are not there are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.draws import drawn
from tests.torchrun_loops import LOOPS
from tests.zoo import equal

ROOT = Path(__file__).resolve().parent.parent
WORLD = 2
TIMEOUT_S = 240
NEEDS = {
    "trainer": "accelerate",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "model_parallel": "lightning",
}


@pytest.mark.parametrize("loop", drawn([loop for loop in LOOPS if loop != "wrapped"], ["wrapped"]))
def test_losses_and_parameters_are_the_plain_ones(loop: str, tmp_path: Path) -> None:
    package = NEEDS.get(loop, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    torchrun(loop, tmp_path)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(WORLD)]
    for plain, ours in ranks:
        assert plain["schedules"] == 0 and ours["schedules"] > 0
        assert len(plain["losses"]) >= 4 and plain["losses"] == ours["losses"]
        assert plain["params"].keys() == ours["params"].keys()
        for name, param in plain["params"].items():
            assert equal(param, ours["params"][name]), name
            if "running" not in name:  # a buffer is this rank's own when the last step is over
                assert equal(param, ranks[0][1]["params"][name]), f"{name} differs between ranks"


@pytest.mark.parametrize("loop", drawn([loop for loop in LOOPS if loop != "ddp"], ["ddp"]))
def test_ranks_that_share_a_model_train_as_plain_ones_do(loop: str, tmp_path: Path) -> None:
    """One line changes: `megacompile(model, mesh=...)`. The plain loop has a DDP around."""
    package = NEEDS.get(loop, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    torchrun(loop, tmp_path, "mesh")
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(WORLD)]
    for plain, ours in ranks:
        assert plain["schedules"] == 0 and ours["schedules"] > 0
        assert len(plain["losses"]) >= 4
        assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert plain["params"].keys() == ours["params"].keys()
        for name, param in plain["params"].items():
            torch.testing.assert_close(ours["params"][name], param, rtol=1e-5, atol=1e-6)
            if "running" not in name:
                assert equal(ours["params"][name], ranks[0][1]["params"][name]), name
    assert ranks[0][1]["losses"] != ranks[1][1]["losses"] or loop == "trainer", "rows of its own"


def torchrun(loop: str, folder: Path, *how: str) -> None:
    """Run a loop in two processes."""
    arguments = loop, str(folder), *how
    processes.torchrun("tests.torchrun_loops", *arguments, ranks=WORLD, timeout_s=TIMEOUT_S)
