"""`graph_key`: equal for the same function, different for anything that changes the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile.passes.stages.templates import graph_key


def key(function: Callable[..., Any]) -> Hashable:
    return graph_key(fx.symbolic_trace(function))


def scaled(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * value


def attention(window: int) -> Callable[[Tensor], Tensor]:
    """What differs between the layers of a model with sliding windows."""
    return lambda x: (x @ x.transpose(-1, -2)).tril().triu(-window)


def test_names_do_not_matter() -> None:
    def first(x: Tensor, weight: Tensor) -> Tensor:
        hidden = x @ weight
        return hidden + x

    def second(state: Tensor, matrix: Tensor) -> Tensor:
        out = state @ matrix
        return out + state

    assert key(first) == key(second) and hash(key(first)) == hash(key(second))


CONSTANTS = [(0.0, -0.0), (1, 1.0), (1, True), (0.1, math.nextafter(0.1, 1.0)), (2, 3)]
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "which input is read": (lambda x, y: x - y, lambda x, y: y - x),
    "which value is returned": (lambda x: (x.sin(), x.cos()), lambda x: (x.cos(), x.sin())),
    "which item": (lambda x: x.max(-1)[0], lambda x: x.max(-1)[1]),
    "tuples": (lambda x: x.view((2, 3)), lambda x: x.view((3, 2))),
    "types in tuples": (lambda x: x.clamp(*(0, 1)), lambda x: x.clamp(*(0.0, 1.0))),
    "slices": (lambda x: x[0:2], lambda x: x[0:3]),
    "windows": (attention(4), attention(8)),
    "keywords": (lambda x: F.dropout(x, p=0.1), lambda x: F.dropout(x, p=0.2)),
    "dtypes": (lambda x: x.to(dtype=torch.bfloat16), lambda x: x.to(dtype=torch.half)),
    **{f"{a} or {b}": (scaled(a), scaled(b)) for a, b in CONSTANTS},
}


def test_what_changes_the_numbers_matters() -> None:
    for what, (one, other) in FUNCTIONS.items():
        assert key(one) == key(one) and key(one) != key(other), what


def test_tensors_that_a_graph_holds_are_told_apart() -> None:
    class Masked(nn.Module):
        def __init__(self, mask: Tensor) -> None:
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("mask")

    one, other = (fx.symbolic_trace(Masked(make(2))) for make in (torch.ones, torch.zeros))
    assert graph_key(one) == graph_key(one) != graph_key(other)


def test_graphs_within_a_graph_are_part_of_the_key() -> None:
    """Of a branch on a value, Dynamo puts each side into a graph module of its own."""

    def branching(otherwise: Callable[[Tensor], Tensor]) -> Hashable:
        sides = {
            "true": fx.symbolic_trace(lambda x: torch.sin(x)),
            "false": fx.symbolic_trace(lambda x: otherwise(x)),
        }
        graph = fx.Graph()
        x = graph.placeholder("x")
        yes, no = (graph.get_attr(name) for name in sides)
        graph.output(graph.call_function(torch.ops.higher_order.cond, (x, yes, no, (x,))))
        return graph_key(fx.GraphModule(sides, graph))

    assert branching(torch.cos) == branching(torch.cos) != branching(torch.tan)
