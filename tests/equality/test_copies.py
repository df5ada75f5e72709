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
from torch.nn.utils.parametrizations import weight_norm

from megacompile import schedules
from tests import inside
from tests.zoo import WIDTH, assert_same, differences, equal, twins

pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")


class Own(nn.Module):
    """A layer whose class says itself how it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).tanh()
        return y


class OwnDeepCopy(Own):
    def __deepcopy__(self, memo: dict[int, Any]) -> OwnDeepCopy:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


class OwnState(Own):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


class NestedState(Own):
    def __getstate__(self) -> dict[str, Any]:
        return {"attributes": dict(self.__dict__)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["attributes"])


class OwnReduce(Own):
    def __reduce__(self) -> tuple[Any, ...]:
        return OwnReduce, (), dict(self.__dict__)


class First(nn.Module):
    """What a layer that also gives its state computes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: First(nn.LSTM(WIDTH, WIDTH, num_layers=2)),
    "deepcopy": OwnDeepCopy,
    "state": OwnState,
    "nested state": NestedState,
    "reduce": OwnReduce,
    "fx": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())),
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
}


def within(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(WIDTH, WIDTH))


def loaded(model: nn.Module, **options: Any) -> nn.Module:
    """Saved and loaded."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    result: nn.Module = torch.load(file, **options)
    return result


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: loaded(model, weights_only=False),
}


def changed(model: nn.Module) -> nn.Module:
    """The model, with other parameters."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    return model


@pytest.mark.parametrize("name", LAYERS)
def test_a_copy_is_a_plain_module(name: str) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(within(LAYERS[name]()))
    x = torch.randn(3, 2, WIDTH)
    for each in (plain, streamed):
        each(x).square().mean().backward()
    for way in WAYS:
        if name != "weight norm" or way == "deepcopy":  # torch does not pickle it
            check_copies(plain, streamed, way, x)


def check_copies(plain: nn.Module, streamed: nn.Module, way: str, x: Tensor) -> None:
    """They are equal, and have nothing of ours."""
    copies = [changed(WAYS[way](each)) for each in (plain, streamed)]
    for each in copies:
        each.zero_grad()
        each(x).square().mean().backward()
    assert equal(copies[0](x), copies[1](x))
    assert differences(*copies) == []
    assert differences(plain, streamed) == [], "its parameters are its own"
    assert not any(inside.is_streamed(module) for module in copies[1].modules())
    again = copy.deepcopy(copies[1])
    for each in (copies[1], again):
        each.forward = types.MethodType(lambda self, x: x + 1, each)
        assert equal(each(x), x + 1), "and so are its methods"
        each.to("meta")
        assert {param.device.type for param in each.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["LSTM", "state"])
def test_what_is_saved_holds_no_more_than_of_a_plain_model(name: str) -> None:
    plain, streamed = twins(within(LAYERS[name]()))
    asked = []
    for each in (plain, streamed):
        file = io.BytesIO()
        torch.save(each, file)
        file.seek(0)
        asked.append(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    assert sorted(asked[0]) == sorted(asked[1])
    kinds = {type(module) for module in plain.modules()}
    names = (set, getattr(torch.nn.modules.rnn, name, set))
    with torch.serialization.safe_globals([*kinds, *names]):
        again = loaded(streamed, weights_only=True)
    x = torch.randn(3, 2, WIDTH)
    assert equal(again(x), plain(x))


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
    torch.manual_seed(0)
    plain, streamed = twins(Modes())
    x = torch.randn(2, WIDTH)
    outputs: list[list[Tensor]] = []
    for each in (plain, streamed):
        each(x).sum().backward()
        shallow = copy.copy(each)
        found = [shallow(x)]
        shallow.training = False
        found += [shallow(x), each(x)]
        shallow.forward = types.MethodType(lambda self, x: self.first(x) * self.scale, shallow)
        found += [shallow(x), each(x)]
        torch.stack(found).square().mean().backward()
        outputs.append([each.detach() for each in found])
        assert each.training and not shallow.training
    assert all(map(equal, *outputs))
    assert_same(plain, streamed)
    with pytest.raises(ValueError, match="Modes"):
        schedules(copy.copy(streamed))
