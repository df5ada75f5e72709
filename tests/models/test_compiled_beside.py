"""What one process compiles, others find: stages, updates and kernels, with Inductor as it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import explain, megacompile
from tests import inside
from tests.processes import python

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Inductor's caches are empty, and no process is left behind."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    inside.stop_processes()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def streamed() -> nn.Module:
    return megacompile(net(), device="cpu", lowering="inductor", progress=False)


def trained(model: nn.Module) -> float:
    """Behind three sizes, one captured with a symbol; the gradients of the first, added."""
    sums = []
    for rows in (4, 6, 7):
        model(torch.linspace(-1, 1, rows * 8).view(rows, 8)).square().sum().backward()
        inside.wait_for_code(model)
        found = [p.grad.double().sum() for p in model.parameters() if p.grad is not None]
        sums.append(float(sum(found)))
    return sums[0]


def code(model: nn.Module) -> Any:
    """How many stages were found, and how many compiled."""
    return explain(model, changes=False).code["stages"]


ELSEWHERE = """
import other
import torch
from tests.models.test_compiled_beside import code, streamed, trained
torch.set_num_threads(1)
model = streamed()
print(trained(model), code(model).made)
"""


@needs_compiler
def test_no_graph_is_compiled_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes compile all but the largest graph, and this one finds it. So does another run,
    whatever it has imported first, with the same numbers; its log says so."""
    with monkeypatch.context() as patient:  # this process compiles nothing that it may ask for
        patient.setattr("concurrent.futures.Future.cancel", lambda self: False)
        patient.setenv("MEGACOMPILE_COMPILE_PROCESSES", "1")
        inside.start_processes()
        model = streamed()
        found = trained(model)
    stages = code(model)
    assert stages.made == 1 and stages.found > 2

    (tmp_path / "other.py").write_text("import torch\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-c", ELSEWHERE, PYTHONPATH=paths, MEGACOMPILE_LOG="compile")
    total, made = done.stdout.split()
    assert made == "0" and float(total) == found
    lines = [line for line in done.stderr.splitlines() if " graphs in " in line]
    said = [line.partition("compiled ")[2].replace("(", "").split() for line in lines]
    assert said and all(words[0] == words[5] for words in said), "all of them from the cache"
