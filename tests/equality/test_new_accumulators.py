"""Parameters that get another AccumulateGrad node between two calls, and gradients all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def another_dtype(model: nn.Module) -> None:
    model.double()
    model.float()


def set_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.set_(torch.full((16, 8), 0.1))


def swapped(model: Any) -> None:
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.full((16, 8), 0.1)))


CHANGES = (another_dtype, set_in_place, swapped)


def hooked(model: Any, seen: list[Tensor]) -> None:
    """A hook on a parameter: each has a gate of its own then."""
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))


def trained(model: Any, change: Callable[[Any], None], hook: bool) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: list[Any] = []
    for i in range(4):
        if i == 2:
            change(model)
            if hook:
                hooked(model, found)
        loss = model(torch.linspace(-1, 1, 16).view(2, 8)).square().mean()
        loss.backward()
        found += [
            loss.detach(),
            *(None if p.grad is None else p.grad.clone() for p in model.parameters()),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_gradients_arrive(change: Callable[[Any], None], hook: bool) -> None:
    want = trained(net(), change, hook)
    got = trained(megacompile(net(), lowering="eager", device="cpu"), change, hook)
    assert len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_updates_in_the_backward_go_on(change: Callable[[Any], None]) -> None:
    """Up to the rounding of that mode."""
    found = []
    for streamed in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if streamed:
            megacompile(model, lowering="eager", device="cpu", optimizer=optimizer)
        losses = []
        for i in range(4):
            if i == 2:
                change(model)
            loss = model(torch.linspace(-1, 1, 16).view(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(torch.stack(losses))
    torch.testing.assert_close(*found)
