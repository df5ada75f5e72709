"""An update is compiled by a process beside this one, and taken over between two steps."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from megacompile import compat, megacompile
from megacompile.code_counts import UPDATES
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.rule import Update
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.updates.compiled import Compiled
from tests import inside
from tests.zoo import equal

pytestmark = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")
DTYPE = torch.float64  # which no other test compiles the update for


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Inductor's caches are empty, and nothing of a rule is known."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(compile_threads=1):
        yield tmp_path


def update_of(dtype: torch.dtype) -> Update:
    generator = torch.Generator().manual_seed(0)
    param, grad, m, v = (torch.rand(1000, generator=generator).to(dtype) for _ in range(4))
    group = AdamW([nn.Parameter(param)]).param_groups[0]
    return Update(param, grad, (m, v, None), ADAM.hyper(group, step=3))


class Steps:
    """A model that trains with AdamW; its stages run as they are, compiled by nobody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch._inductor, "compile", lambda module, _: self._stage(module))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DTYPE)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        megacompile(self.model, device="cpu", lowering="inductor", progress=False)

    @staticmethod
    def _stage(module: Any) -> Any:
        return lambda *given: module(*(given[0] if isinstance(given[0], list) else given))

    def train(self, steps: int) -> set[Any]:
        """How the host has made the updates."""
        for k in range(steps):
            x = torch.linspace(-1, k + 1, 32, dtype=DTYPE).view(4, 8)
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return inside.ways(self.model)


def test_an_update_is_compiled_elsewhere_and_found_here(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing compiles here meanwhile, and nothing is compiled again, in another run either. The
    parameters of a run that switches have the bits of one that does not."""
    update = update_of(DTYPE)
    rule = Compiled(ADAM)
    before = compat.cache_counts()
    found, beside, made = UPDATES.found, UPDATES.beside, UPDATES.made
    rule.expect(update)
    assert not rule.ready(update) and not rule.ready(update)
    assert compat.cache_counts() == before
    rule.wait()
    assert rule.ready(update)
    assert compat.cache_counts().since(before) == (1, 0)
    assert (UPDATES.found, UPDATES.beside, UPDATES.made) == (found + 1, beside + 1, made)
    assert UPDATES.time_s > 0
    mine, its = (update.map(lambda _, tensor: tensor.clone()) for _ in range(2))
    with torch.no_grad():
        rule(mine)
    apply(ADAM, its)
    assert all(equal(a, b) for (_, a), (_, b) in zip(mine.tensors(), its.tensors(), strict=True))

    torch.compiler.reset()
    torch.compile(torch.sin, backend="eager")(torch.ones(3))  # whatever was captured before
    before = compat.cache_counts()
    assert Compiled(ADAM).ready(update), "as in another run: no process begins"
    assert compat.cache_counts().since(before) == (1, 0)
    assert (UPDATES.found, UPDATES.beside, UPDATES.made) == (found + 2, beside + 1, made)

    shutil.rmtree(cold / "megacompile")  # what says that it is there
    sleeps = cold / "python"
    sleeps.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeps.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeps))
    switches = Steps(monkeypatch)
    (torchs,) = switches.train(2)
    for process in psutil.Process().children():
        if "sleep" in process.name():
            process.kill()
            process.wait()
    (compiled,) = switches.train(2)
    assert (torchs.name, compiled.name) == ("TORCH", "COMPILED")
    steady = Steps(monkeypatch)
    assert steady.train(2) == {compiled}
    steady.train(2)
    pairs = zip(switches.model.parameters(), steady.model.parameters(), strict=True)
    assert all(equal(a.detach(), b.detach()) for a, b in pairs)


@pytest.mark.thorough
def test_a_compiler_that_fails_refuses(cold: Path) -> None:
    """And the process says so."""
    update, rule = update_of(torch.float32), Compiled(ADAM)
    with torch._inductor.config.patch({"cpp.cxx": ("/bin/false",)}):
        assert not rule.ready(update)
    rule.wait()
    with pytest.warns(UserWarning, match="cannot be compiled"):
        assert not rule.ready(update)


@pytest.mark.thorough
def test_it_is_found_though_settings_have_changed(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's settings, and what depends on whether a process sees a GPU."""
    update, rule = update_of(torch.float32), Compiled(ADAM)
    rule.expect(update)
    rule.wait()
    monkeypatch.setattr("torch._inductor.compile_fx.has_triton", lambda: True)  # on a GPU
    before = compat.cache_counts()
    with torch._inductor.config.patch({"triton.unique_kernel_names": False}):
        assert rule.ready(update)
        assert not torch._inductor.config.triton.unique_kernel_names
    assert compat.cache_counts().since(before) == (1, 0)
