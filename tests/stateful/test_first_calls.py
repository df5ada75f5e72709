"""Models that are called for the first time in threads of their own, at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import compat, megacompile

THREADS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    wide = [nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4)]
    return nn.Sequential(*wide)


def losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.linspace(-1, 1, 32).view(4, 8)
    found = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_first_calls_in_threads() -> None:
    """What says that FX traces is of the process: another thread's call was refused, and all later
    ones where two tracers ended in another order than they began."""
    want = losses(net())
    models = [megacompile(net(), lowering="eager", device="cpu") for _ in range(THREADS)]
    begin = threading.Barrier(THREADS)

    def work(model: nn.Module) -> list[float]:
        begin.wait()
        return losses(model)

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, models)) == [want] * THREADS
    assert not torch.fx._symbolic_trace._is_fx_tracing_flag
    assert losses(megacompile(net(), lowering="eager", device="cpu")) == want


@pytest.mark.skipif(
    "force_compile_during_fx_trace" not in compat.CALL_OPTIONS, reason="this torch always refuses"
)
def test_a_call_while_another_thread_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is compiled already waits for nobody."""
    model = megacompile(net(), lowering="eager", device="cpu")
    x = torch.ones(2, 8)
    want = model(x)
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    assert torch.equal(model(x), want)
