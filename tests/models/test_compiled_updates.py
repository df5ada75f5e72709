"""An update is compiled by a process beside this one, and taken over between two steps."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from megacompile import explain, megacompile
from tests import inside
from tests.zoo import equal

pytestmark = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="needs a C++ compiler")
DTYPE = torch.float64  # which no other test compiles the update for


class Steps:
    """A model that trains with AdamW; its stages run as they are, compiled by nobody."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(DTYPE)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01)
        self.count = 0
        megacompile(self.model, device="cpu", lowering="inductor", progress=False)

    def train(self) -> str:
        """How the host has made the updates of one more step."""
        self.count += 1
        x = torch.linspace(-1, self.count, 32, dtype=DTYPE).view(4, 8)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        (way,) = inside.ways(self.model)
        return way.name

    @property
    def updates(self) -> Any:
        """Where the code of this process's updates came from."""
        return replace(explain(self.model, changes=False).code["updates in C++"])


def as_it_is(module: Any, _: Any) -> Any:
    return lambda *given: module(*(given[0] if isinstance(given[0], list) else given))


def test_an_update_is_compiled_elsewhere_and_found_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing compiles here meanwhile, and nothing is compiled again, in another run either, though
    Inductor's settings have changed. A run that switches has the bits of one that does not."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor, "compile", as_it_is)
    with torch._inductor.config.patch(compile_threads=1):
        switches = Steps()
        assert switches.train() == "TORCH"
        before, until_s = switches.updates, time.monotonic() + 250
        while switches.train() == "TORCH":
            assert time.monotonic() < until_s and switches.updates == before
            time.sleep(0.2)
        assert switches.train() == "COMPILED"
    found = switches.updates
    assert (found.found, found.beside) == (before.found + 1, before.beside + 1)
    assert found.made == before.made and found.time_s > before.time_s

    torch.compiler.reset()  # as in another run: no process begins
    torch.compile(torch.sin, backend="eager")(torch.ones(3))  # whatever was captured before
    monkeypatch.setattr("torch._inductor.compile_fx.has_triton", lambda: True)  # on a GPU
    settings = {"triton.unique_kernel_names": False, "compile_threads": 1}
    children = psutil.Process().children()
    with torch._inductor.config.patch(settings):
        steady = Steps()
        assert {steady.train() for _ in range(switches.count)} == {"COMPILED"}
        assert not torch._inductor.config.triton.unique_kernel_names
    assert not set(psutil.Process().children()) - set(children)
    again = steady.updates
    assert (again.found, again.beside, again.made) == (found.found + 1, found.beside, found.made)
    pairs = zip(switches.model.parameters(), steady.model.parameters(), strict=True)
    assert all(equal(a.detach(), b.detach()) for a, b in pairs)
