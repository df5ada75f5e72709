"""What a stage's code is made of: constants that are equal, and eager code that leaves out what is
between the kernels."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from megacompile import compat
from megacompile.ir.constants import constant_key, function_key
from megacompile.passes.stages.direct import direct, without_idle_views
from tests.whole import Config, Kernel, Rounding

# Constants.


@dataclass
class Changeable:
    value: int = 1


EQUAL: list[Callable[[], Any]] = [
    lambda: (1, (2.0, None)),
    lambda: float("nan"),
    lambda: Rounding.HALVES,
    lambda: Kernel(False),
    lambda: Config(dtype=torch.bfloat16),
]
OTHERS = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ((True,), Kernel(True)),
    (Rounding.HALVES, Rounding.QUARTERS),
    (Config(Rounding.HALVES), Config(Rounding.QUARTERS)),
]


def test_constants_are_told_by_what_they_are() -> None:
    for make in EQUAL:
        one, other = constant_key(make()), constant_key(make())
        assert one == other and hash(one) == hash(other)
    for first, second in OTHERS:
        assert constant_key(first) != constant_key(second), (first, second)
    for value in (Changeable(), [1], torch.ones(2), (1, Changeable()), object()):
        with pytest.raises(TypeError):  # it can change
            constant_key(value)


def around(value: Any, default: int = 0) -> Callable[[], Any]:
    def function(given: int = default) -> Any:
        return value, given

    return function


def test_functions_are_told_by_what_they_are_around() -> None:
    shared, other = [1], [1]
    assert function_key(around(shared)) == function_key(around(shared))
    assert hash(function_key(around(shared))) == hash(function_key(around(shared)))
    for another in (around(other), lambda: shared, around(shared, 2000)):
        assert function_key(around(shared)) != function_key(another)
    inner = around(1)
    assert isinstance(inner, types.FunctionType)
    hidden = types.FunctionType(inner.__code__, {}, closure=(types.CellType(),))
    for function in (torch.relu, around, functools.partial(around, 1), "relu", hidden):
        assert function_key(function) is function, "what is no closure is itself"


# Eager code.

Function = Callable[[list[Tensor]], list[Tensor]]
X = torch.linspace(-1, 1, 24).view(2, 3, 4)
FUNCTIONS: dict[str, tuple[Function, list[str] | None]] = {  # and the calls that are left
    "a view of a view": (lambda p: [p[0].view(6, 4).view(24) + 1], ["view", "add"]),
    "of what is not contiguous": (
        lambda p: [p[0].transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 4) + 1],
        ["transpose", "view", "add"],
    ),
    "the same shape": (lambda p: [p[0].view(2, 3, 4).expand(2, 3, 4).detach() * 2], ["mul"]),
    "another shape": (lambda p: [p[0].unsqueeze(0).expand(2, 2, 3, 4) * 2], None),
    "other strides": (lambda p: [p[0].transpose(0, 1).contiguous().view(6, 4) * 2], None),
    "what is returned": (lambda p: [p[0].view(2, 3, 4), p[0].detach(), p[0] + 1], None),
    "another dtype": (lambda p: [p[0].view(torch.int32).view(24) + 1], None),
    "several results": (lambda p: list(p[0].split(1, 0)) + list(torch.max(p[0], -1)), None),
    "constants": (
        lambda p: [torch.full_like(p[0], float("inf")) + p[0].to(torch.float64), p[0].sum(-1)],
        None,
    ),
}


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return compat.trace(lambda primals, _: function(primals), inputs, [], {})


def names(graph: fx.Graph) -> list[str]:
    called = [node for node in graph.nodes if node.op == "call_function"]
    return [compat.operator_name(node.target) or str(node.target) for node in called]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_results_in_fewer_calls(name: str) -> None:
    function, left = FUNCTIONS[name]
    module = traced(function, X)
    before = module.code
    code: Any = direct(module)
    want, got = module(X), code(X)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, Tensor) and a.dtype == b.dtype and a.stride() == b.stride()
        assert torch.equal(a, b) and a._is_view() == b._is_view()
    assert module.code == before, "the graph is left as it is"
    assert left is None or names(without_idle_views(module.graph)) == left
    assert "ops" not in code.__func__.__code__.co_names, "no look-up is left"


def test_a_view_of_any_size_stays() -> None:
    """Sizes that are symbols are equal today only: of 4 elements, a row of 4 is all."""
    module = traced(lambda p: [p[0].view(-1, 4) + 1, p[0].view(6, 4).view(-1) + 1], X.view(6, 4))
    assert names(without_idle_views(module.graph)) == ["add", "view", "add"]
    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["megacompile.symbolic"] = "of symbols"
    assert names(without_idle_views(module.graph)) == ["view", "add", "view", "add"]
    x = torch.linspace(0, 1, 64).view(8, 8)
    (first, *_) = direct(module)(x)
    assert first is not None and torch.equal(first, x.view(-1, 4) + 1)
