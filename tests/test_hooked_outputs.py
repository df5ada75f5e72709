"""Hooks on outputs from which a captured graph computes others."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile


class Two(nn.Module):
    """Gives what it computes, and what it computes that from."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(hidden), hidden


def ran(model: nn.Module, hook: str, *, both: bool = True) -> tuple[Any, list[Tensor | None]]:
    """The gradient of the inner output, and those of the parameters."""
    result, hidden = model(torch.ones(3, 4))
    if hook == "retain_grad":
        hidden.retain_grad()
    elif hook:
        hidden.register_hook(lambda gradient: gradient * 3)
    (result.sum() * both + hidden.sum()).backward()
    kept = hidden.grad if hook == "retain_grad" else None
    return kept, [param.grad for param in model.parameters()]


def pair(breaks: bool = False) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Two(breaks)
    model = copy.deepcopy(plain)
    return plain, megacompile(model, device="cpu", lowering="eager")


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad"])
def test_it_is_said_once(hook: str) -> None:
    _, model = pair()
    with pytest.warns(UserWarning, match=r"output 1 has a hook, .*graph_break\(\)"):
        ran(model, hook)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran(model, hook)


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad"])
@pytest.mark.filterwarnings("error:megacompile.*output")
def test_behind_a_graph_break_it_sees_all(hook: str) -> None:
    for ours, theirs in zip(*(ran(model, hook) for model in pair(breaks=True)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.filterwarnings("error:megacompile.*output")
def test_nothing_is_said_without_a_part_that_it_misses() -> None:
    _, model = pair()
    ran(model, "")
    _, hidden = model(torch.ones(3, 4))
    hidden.register_hook(lambda gradient: gradient * 3)
    hidden.sum().backward()  # all of its gradient
