"""Lists and dicts that a forward is given, and changes: the caller has them too."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from megacompile.runtime.params import inputs


class Leaves(nn.Module):
    """A model that leaves something in what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, losses: Any) -> Tensor:
        y: Tensor = self.linear(x)
        if isinstance(losses, (list, deque)):
            losses.append(y.square().mean())
        else:
            losses["aux"] = y.square().mean()
        return y


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("make", [list, deque, dict, OrderedDict, lambda: [torch.ones(2)]])
def test_it_is_the_callers(make: Callable[[], Any], by_name: bool) -> None:
    grads = []
    for ours in (False, True):
        torch.manual_seed(0)
        model, losses, x = Leaves(), make(), torch.ones(2, 4)
        if ours:
            model = megacompile(model, device="cpu", lowering="eager")
        y = model(x, losses=losses) if by_name else model(x, losses)
        last = losses["aux"] if isinstance(losses, dict) else losses[-1]
        (y.sum() + last).backward()
        grads.append(model.linear.weight.grad)
    assert grads[0] is not None and grads[1] is not None and torch.equal(grads[0], grads[1])


def test_only_what_moves_is_another_one() -> None:
    """The containers around it are, and those beside it are not."""
    here, there, stays = torch.ones(2), torch.zeros(2), torch.ones(3)
    beside, around = [stays], {"x": [here, stays]}
    args, kwargs = inputs.moved((beside, around), {}, lambda t: there if t is here else t)
    assert args[0] is beside and kwargs == {}
    assert args[1]["x"][0] is there and args[1]["x"][1] is stays
    assert around["x"][0] is here, "the caller's is as it was"
