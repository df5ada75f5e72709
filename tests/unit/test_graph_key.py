"""`graph_key`: equal for the same function, different for anything that changes the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from megacompile.passes.stages.templates import graph_key


def key(function: Callable[..., Any]) -> Hashable:
    return graph_key(fx.symbolic_trace(function))


def scaled(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * value


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
    "windows": (lambda x: x.tril().triu(-4), lambda x: x.tril().triu(-8)),
    "keywords": (lambda x: F.dropout(x, p=0.1), lambda x: F.dropout(x, p=0.2)),
    "dtypes": (lambda x: x.to(dtype=torch.bfloat16), lambda x: x.to(dtype=torch.half)),
    **{f"{a} or {b}": (scaled(a), scaled(b)) for a, b in CONSTANTS},
}


def test_what_changes_the_numbers_matters() -> None:
    for what, (one, other) in FUNCTIONS.items():
        assert key(one) == key(one) and key(one) != key(other), what


def test_tensors_and_graphs_within_a_graph_are_part_of_the_key() -> None:
    """Of a branch on a value, Dynamo puts each side into a graph module of its own."""

    def holding(held: Any) -> Hashable:
        graph = fx.Graph()
        x = graph.placeholder("x")
        found = graph.get_attr("held")
        if isinstance(held, Tensor):
            graph.output(graph.call_function(torch.mul, (x, found)))
        else:
            graph.output(graph.call_function(torch.ops.higher_order.cond, (x, found, found, (x,))))
        return graph_key(fx.GraphModule({"held": held}, graph))

    for one, other in (
        (torch.ones(2), torch.zeros(2)),
        (fx.symbolic_trace(lambda x: torch.sin(x)), fx.symbolic_trace(lambda x: torch.cos(x))),
    ):
        assert holding(one) == holding(one) != holding(other)
