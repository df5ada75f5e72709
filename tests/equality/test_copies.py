"""Copies and pickles of a streamed model are plain modules.

Each test does the same to a megacompiled model and to a plain copy of it, in the same process, and
compares every bit.
"""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile import schedules
from tests import inside
from tests.equality.calls import assert_alike, trained
from tests.zoo import WIDTH, differences, equal, twins

pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")


class Own(nn.Module):
    """A layer whose class says itself how it is copied, or what its state is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        return y


class NestedState(Own):
    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": dict(self.__dict__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"])


class First(nn.LSTM):
    """What it computes, without its state."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = super().forward(x)[0]
        return y


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: First(WIDTH, WIDTH, num_layers=2),
    "nested state": NestedState,
    "fx": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
}


def within(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(WIDTH, WIDTH))


def through_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Callable[[nn.Module], Any]] = [
    copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file
]  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_copy_is_a_plain_module(name: str) -> None:
    """They are equal, and have nothing of ours."""
    torch.manual_seed(0)
    models = twins(within(LAYERS[name]()))
    x = torch.randn(3, 2, WIDTH)
    assert_alike(models, trained(x))
    for way in WAYS:
        copies = [way(each) for each in models]
        for each in copies:
            each.zero_grad()
            with torch.no_grad():
                for param in each.parameters():
                    param.mul_(2)
        assert_alike(copies, trained(x))
        assert differences(*models) == [], "its parameters are its own"
        assert not any(inside.is_streamed(module) for module in copies[1].modules())
        again = copy.deepcopy(copies[1])
        for each in (copies[1], again):
            each.forward = types.MethodType(lambda self, x: x + 1, each)
            assert equal(each(x), x + 1), "and so are its methods"
            each.to("meta")
            assert {param.device.type for param in each.parameters()} == {"meta"}


# --- copy.copy


class Modes(nn.Module):
    """Says in which mode it is, and by which method it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x)) * (self.scale if self.training else 3)

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x.tanh())
        return y


def test_a_shallow_copy_is_a_module_of_its_own_around_the_same_layers() -> None:
    models = twins(Modes())
    x = torch.randn(2, WIDTH)

    def use(model: Any) -> Any:
        model(x).sum().backward()
        shallow = copy.copy(model)
        found = [shallow(x)]
        shallow.training = False
        found += [shallow(x), model(x)]
        shallow.forward = types.MethodType(lambda self, x: self.first(x) * self.scale, shallow)
        found += [shallow(x), model(x)]
        torch.stack(found).square().mean().backward()
        assert model.training and not shallow.training
        return found

    assert_alike(models, use)
    with pytest.raises(ValueError, match="Modes"):
        schedules(copy.copy(models[1]))
