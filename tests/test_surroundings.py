"""What is around a megacompiled model: default devices, tracers, frozen parameters, odd dtypes.

Each gives what the plain model gives, or an error that says what to do.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import ModelError, compat, megacompile
from tests.zoo import Inputs, assert_same, equal, stacks

needs_compiler = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")


def train(model: nn.Module, inputs: Inputs, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(**inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_default_device() -> None:
    plain, streamed, inputs = stacks()
    copied = copy.deepcopy(plain)
    torch.set_default_device("meta")
    try:
        made = megacompile(copied, device="cpu", lowering="eager")
        found = [train(model, inputs) for model in (streamed, made)]
    finally:
        torch.set_default_device(None)
    assert found == [train(plain, inputs)] * 2
    assert_same(plain, streamed)
    assert_same(plain, made)


def test_frozen_between_forward_and_backward() -> None:
    plain, streamed, inputs = stacks()
    for model in (plain, streamed):
        loss = model(**inputs)
        model.layers[1].requires_grad_(False)
        loss.backward()
        assert model.layers[1].up.weight.grad is None
    assert_same(plain, streamed)


def _func(model: nn.Module, inputs: Inputs) -> Any:
    return torch.func.grad(lambda x: model(x, inputs["y"]))(inputs["x"])


def _vmap(model: nn.Module, inputs: Inputs) -> Any:
    return torch.func.vmap(lambda x: model(x[None])[0])(inputs["x"])


def _export(model: nn.Module, inputs: Inputs) -> Any:
    return torch.export.export(model, (inputs["x"],)).module()(inputs["x"])


def _trace(model: nn.Module, inputs: Inputs) -> Any:
    traced: Any = torch.jit.trace(model, (inputs["x"],))
    return traced(inputs["x"])


TRACERS: dict[str, Callable[[nn.Module, Inputs], Any]] = {
    "torch.func": _func,
    "torch.func, vmap": _vmap,
    "torch.export": _export,
    "torch.jit.trace": _trace,
}


@pytest.mark.parametrize("name", TRACERS)
@pytest.mark.filterwarnings("ignore")
def test_tracers_are_refused_and_take_a_copy(name: str) -> None:
    plain, streamed, inputs = stacks()
    what = name.partition(",")[0].replace(".", r"\.")
    with pytest.raises(ModelError, match=rf"called within {what}, .*copy\.deepcopy\(model\)"):
        TRACERS[name](streamed, inputs)
    wanted, got = (TRACERS[name](model, inputs) for model in (plain, copy.deepcopy(streamed)))
    assert equal(wanted.detach(), got.detach())
    assert train(plain, inputs) == train(streamed, inputs), "and it still works"
    assert_same(plain, streamed)


class Odd(nn.Module):
    """Has a parameter without elements, a complex one or a float64 one beside others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        dtypes = {"complex": torch.complex64, "float64": torch.float64}
        size = (0, 4) if kind == "empty" else (4,)
        self.odd = nn.Parameter(torch.full(size, 0.5, dtype=dtypes.get(kind)))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(torch.tanh(self.first(x)))
        if self.kind == "empty":
            result = torch.cat([hidden, self.odd])
        elif self.kind == "complex":
            result = torch.view_as_real(hidden * self.odd)
        else:
            result = hidden.double() * self.odd
        total: Tensor = result.square().sum()
        return total


@needs_compiler
@pytest.mark.parametrize("kind", ["empty", "complex", "float64"])
@pytest.mark.filterwarnings("ignore:megacompile")
def test_odd_parameters_with_inductor(kind: str) -> None:
    torch.manual_seed(0)
    plain = Odd(kind)
    streamed = megacompile(copy.deepcopy(plain), device="cpu", lowering="inductor")
    inputs = {"x": torch.randn(2, 4)}
    assert train(plain, inputs) == pytest.approx(train(streamed, inputs), rel=1e-5)
    for mine, theirs in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_dynamo_disabled_and_no_home() -> None:
    """In a process of its own: both are read when torch is imported."""
    program = (
        "from tests.zoo import stacks, assert_steps_same\n"
        "assert_steps_same(*stacks())\n"
        "print('the same')"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        env={**environment, "TORCHDYNAMO_DISABLE": "1", "HOME": "/proc/none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "the same" in result.stdout
    assert "runs in eager mode" in result.stderr
