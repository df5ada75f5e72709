"""An update is compiled by a process beside this one, and taken over between two steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from megacompile import explain, megacompile
from tests import inside
from tests.processes import python
from tests.zoo import equal, uncompiled

pytestmark = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="needs a C++ compiler")


class Run:
    """A model that trains with AdamW; its stages run as they are, compiled by nobody."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.dtype, self.others = dtype, set(psutil.Process().children())
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        megacompile(self.model, device="cpu", lowering="inductor", progress=False)
        with torch.no_grad():
            self.model(torch.zeros(4, 8, dtype=dtype))

    def train(self, steps: int) -> set[str]:
        """How the host has made the updates."""
        for k in range(steps):
            x = torch.linspace(-1, k + 1, 32).view(4, 8)
            self.model(x.to(self.dtype)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return inside.backends(self.model)

    def code(self) -> tuple[int, int]:
        """The updates found, and compiled here."""
        counts = explain(self.model, changes=False).code.get("updates in C++")
        return (counts.found, counts.made) if counts else (0, 0)

    def wait(self) -> None:
        """Until the processes that have begun since are over."""
        for process in set(psutil.Process().children()) - self.others:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def values(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Inductor's caches are empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr(torch._inductor, "compile", uncompiled)
    with torch._inductor.config.patch(compile_threads=1):
        yield


ANOTHER_RUN = """
import torch
from tests.models.test_compiled_updates import Run, uncompiled
torch._inductor.compile = uncompiled
run = Run(torch.float64)
print(*run.train(2) | run.train(2), *run.code(), sep=", ")
torch.save(run.values(), "values")
"""


def test_an_update_is_compiled_elsewhere_and_found_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing compiles here meanwhile, and nothing is compiled again, though Inductor's settings
    have changed, nor in another run. The run that switches has the bits of those that do not."""
    gate, waits = tmp_path / "gate", tmp_path / "python"
    waits.write_text(
        f'#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.05; done\nexec {sys.executable} "$@"\n'
    )
    waits.chmod(0o755)
    switches = Run(torch.float64)  # no other test of this process has such states
    found, made = switches.code()
    with monkeypatch.context() as slow:
        slow.setattr(sys, "executable", str(waits))
        assert switches.train(2) == {"torch"}
    assert switches.code() == (found, made)
    gate.touch()
    switches.wait()
    changed = torch._inductor.config.patch({"triton.unique_kernel_names": False})
    with monkeypatch.context() as on_a_gpu, changed:
        on_a_gpu.setattr("torch._inductor.compile_fx.has_triton", lambda: True)
        assert switches.train(2) == {"compiled to C++"}
    assert switches.code() == (found + 1, made)
    assert explain(switches.model, changes=False).code["updates in C++"].time_s > 0
    torch.compiler.reset()
    steady = Run(torch.float64)
    assert (steady.train(2), steady.code()) == ({"compiled to C++"}, (found + 1, made))
    steady.train(2)
    assert Run(torch.float16).train(1) == {"torch"}, "each kind is asked for"
    another = python("-c", ANOTHER_RUN, folder=tmp_path)
    assert another.stdout == "compiled to C++, 1, 0\n", another.stderr
    values = zip(switches.values(), steady.values(), torch.load(tmp_path / "values"), strict=True)
    assert all(equal(a, b) and equal(a, c) for a, b, c in values)


@pytest.mark.thorough
def test_a_compiler_that_fails_refuses(tmp_path: Path) -> None:
    """And the process says so."""
    fails = tmp_path / "c++"
    fails.write_text('#!/bin/sh\ntest "$1" = --version\n')
    fails.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (str(fails),)}):
        run = Run(torch.float32)
        assert run.train(1) == {"torch"}
        run.wait()
        with pytest.warns(UserWarning, match="compiled"):
            assert run.train(1) == {"torch"}
