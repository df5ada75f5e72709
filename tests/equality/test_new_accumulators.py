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


def and_the_old_data(model: Any) -> None:
    """As around an evaluation in half precision: the parameter's memory is what it was."""
    before = [param.data for param in model.parameters()]
    model.half()
    for param, data in zip(model.parameters(), before, strict=True):
        param.data = data


def set_in_place(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.set_(torch.full((16, 8), 0.1))


def swapped(model: Any) -> None:
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.full((16, 8), 0.1)))


CHANGES = (another_dtype, and_the_old_data, set_in_place, swapped)


def hooked(model: Any, seen: list[Tensor]) -> None:
    """A hook on a parameter: each has a gate of its own then."""
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))


def trained(change: Callable[[Any], None], how: str, streamed: bool) -> list[Any]:
    """Losses and gradients of a model that is changed between two steps."""
    model, found = net(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if streamed:
        updates = optimizer if how == "in the backward" else None
        megacompile(model, lowering="eager", device="cpu", optimizer=updates)
    for i in range(4):
        if i == 2:
            change(model)
            if how == "hook":
                hooked(model, found)
        loss = model(torch.linspace(-1, 1, 16).view(2, 8)).square().mean()
        loss.backward()
        found.append(loss.detach())
        if how != "in the backward":
            found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("how", ["plain", "hook", "in the backward"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_gradients_arrive(change: Callable[[Any], None], how: str) -> None:
    """Up to rounding, where the update is in the backward."""
    want, got = (trained(change, how, streamed) for streamed in (False, True))
    assert len(got) == len(want)
    if how == "in the backward":
        torch.testing.assert_close(got, want)
    else:
        assert all(map(torch.equal, got, want))
