"""`graph_key`: equal for the same function, different for anything that changes the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile.passes.stages.canonical import graph_key
from tests.capturing import Layer, Net, capture


def key(function: Callable[..., Any]) -> Hashable:
    return graph_key(fx.symbolic_trace(function))


def attention(window: int) -> Callable[[Tensor], Tensor]:
    """What differs between the layers of a model with sliding windows."""

    def layer(x: Tensor) -> Tensor:
        scores: Tensor = x @ x.transpose(-1, -2)
        return scores.tril().triu(-window)

    return layer


def scaled(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * value


def test_names_do_not_matter() -> None:
    def first(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x @ weight
        return hidden + x

    def second(state: Tensor, matrix: Tensor) -> Tensor:
        out = state @ matrix
        return out + state

    assert key(first) == key(second)
    assert hash(key(first)) == hash(key(second))


def test_which_input_is_read_matters() -> None:
    assert key(lambda x, y: x - y) != key(lambda x, y: y - x)
    assert key(lambda x, y: x + x) != key(lambda x, y: x + y)


def test_which_value_is_returned_matters() -> None:
    assert key(lambda x: (x.sin(), x.cos())) != key(lambda x: (x.cos(), x.sin()))
    assert key(lambda x: x.max(-1)[0]) != key(lambda x: x.max(-1)[1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (0.1, math.nextafter(0.1, 1.0)),
        (float("inf"), float("-inf")),
        (2, 3),
    ],
    ids=str,
)
def test_another_constant_is_another_key(one: float, other: float) -> None:
    assert key(scaled(one)) != key(scaled(other))
    assert key(scaled(one)) == key(scaled(one))


def test_constants_within_tuples_and_slices_matter() -> None:
    assert key(lambda x: x.view((2, 3))) == key(lambda x: x.view((2, 3)))
    assert key(lambda x: x.view((2, 3))) != key(lambda x: x.view((3, 2)))
    assert key(lambda x: x.clamp(*(0, 1))) != key(lambda x: x.clamp(*(0.0, 1.0)))
    assert key(lambda x: x[0:2]) == key(lambda x: x[0:2])
    assert key(lambda x: x[0:2]) != key(lambda x: x[0:3])
    assert key(lambda x: x[0:2]) != key(lambda x: x[0:2:1])


def test_another_window_is_another_key() -> None:
    assert key(attention(4)) == key(attention(4))
    assert key(attention(4)) != key(attention(8))


def test_keyword_arguments_matter() -> None:
    assert key(lambda x: F.dropout(x, p=0.1)) != key(lambda x: F.dropout(x, p=0.2))
    assert key(lambda x: x.sum(dim=0)) != key(lambda x: x.sum(dim=0, keepdim=True))
    assert key(lambda x: x.to(dtype=torch.bfloat16)) != key(lambda x: x.to(dtype=torch.half))


def test_tensors_that_a_graph_holds_are_told_apart() -> None:
    class Masked(nn.Module):
        def __init__(self, mask: Tensor) -> None:
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("mask")

    ones, zeros = torch.ones(2), torch.zeros(2)
    assert graph_key(fx.symbolic_trace(Masked(ones))) != graph_key(fx.symbolic_trace(Masked(zeros)))
    one = fx.symbolic_trace(Masked(ones))
    assert graph_key(one) == graph_key(one)


def _keys(net: Net) -> list[Hashable]:
    """The keys of the stages of `net`, without the first and the last: its layers."""
    stages = capture(net, torch.ones(2, 4)).partition().stages
    return [graph_key(stage.module) for stage in stages[1:-1]]


def test_equal_layers_share() -> None:
    first, second, third = _keys(Net(Net.chain))
    assert first == second == third


def test_a_layer_with_another_attribute_does_not_share() -> None:
    net = Net(Net.chain)
    net.layers[1] = Layer(scale=-0.0)
    net.layers[2] = Layer(scale=0.0)
    assert len(set(_keys(net))) == 3


class Branching(nn.Module):
    """A layer with a branch on a value; Dynamo puts each side into a graph module of its own."""

    def __init__(self, otherwise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.otherwise = otherwise

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        out: Tensor = torch.cond(x.sum() > 0, torch.sin, self.otherwise, (x,))
        return out


def test_graphs_within_a_graph_are_part_of_the_key() -> None:
    net = Net(Net.chain)
    net.layers = nn.ModuleList([Branching(torch.cos), Branching(torch.cos), Branching(torch.tan)])
    first, second, third = _keys(net)
    assert first == second != third
