"""`direct`: eager code is the graph's, without what stands between it and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from megacompile import compat
from megacompile.passes.stages.direct import direct, without_idle_views

Function = Callable[[list[Tensor]], list[Tensor]]


def traced(function: Function, *inputs: Tensor) -> fx.GraphModule:
    return compat.trace(lambda primals, _: function(primals), inputs, [], {})


def names(graph: fx.Graph) -> list[str]:
    called = [node for node in graph.nodes if node.op == "call_function"]
    return [compat.operator_name(node.target) or str(node.target) for node in called]


X = torch.linspace(-1, 1, 24).view(2, 3, 4)
FUNCTIONS: dict[str, tuple[Function, list[str]]] = {
    "a view of a view": (lambda p: [p[0].view(6, 4).view(24) + 1], ["view", "add"]),
    "of what is not contiguous": (
        lambda p: [p[0].transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 4) + 1],
        ["transpose", "view", "add"],
    ),
    "the same shape": (lambda p: [p[0].view(2, 3, 4).expand(2, 3, 4).detach() * 2], ["mul"]),
    "another shape": (lambda p: [p[0].unsqueeze(0).expand(2, 2, 3, 4) * 2], None),  # type: ignore[dict-item]
    "other strides": (lambda p: [p[0].transpose(0, 1).contiguous().view(6, 4) * 2], None),  # type: ignore[dict-item]
    "what is returned": (lambda p: [p[0].view(2, 3, 4), p[0].detach(), p[0] + 1], None),  # type: ignore[dict-item]
    "another dtype": (lambda p: [p[0].view(torch.int32).view(24) + 1], None),  # type: ignore[dict-item]
    "several results": (lambda p: list(p[0].split(1, 0)) + list(torch.max(p[0], -1)), None),  # type: ignore[dict-item]
    "constants": (
        lambda p: [torch.full_like(p[0], float("inf")) + p[0].to(torch.float64), p[0].sum(-1)],
        None,  # type: ignore[dict-item]
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_results_in_fewer_calls(name: str) -> None:
    function, left = FUNCTIONS[name]
    module = traced(function, X)
    before = module.code
    want, got = module(X), direct(module)(X)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, Tensor) and a.dtype == b.dtype and a.stride() == b.stride()
        assert torch.equal(a, b) and a._is_view() == b._is_view()
    assert module.code == before, "the graph is left as it is"
    if left:
        assert names(without_idle_views(module.graph)) == left


def test_no_look_up_is_left() -> None:
    function: Any = direct(traced(lambda p: [(p[0] * 2).sum(-1).relu()], X))
    used = function.__func__.__code__.co_names
    assert "ops" not in used and {"kernel_aten_mul_Tensor", "kernel_aten_relu_default"} <= {*used}


def test_a_view_of_any_size_stays() -> None:
    """Sizes that are symbols are equal today only: of 4 elements, a row of 4 is all."""
    module = traced(lambda p: [p[0].view(-1, 4) + 1, p[0].view(6, 4).view(-1) + 1], X.view(6, 4))
    assert names(without_idle_views(module.graph)) == ["add", "view", "add"]
    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            node.meta["megacompile.symbolic"] = "of symbols"
    graph = without_idle_views(module.graph)
    assert names(graph) == ["view", "add", "view", "add"]
    code: Any = direct(module)
    x = torch.linspace(0, 1, 64).view(8, 8)
    assert torch.equal(code(x)[0], x.view(-1, 4) + 1)


@pytest.mark.parametrize(
    "base", [X, X.transpose(0, 1), X.mT, X[:, :, :2], X[:1].expand(4, 3, 4), X[:, :0]]
)
def test_what_is_a_view_of_a_view_is_a_view(base: Tensor) -> None:
    """Of any base: `view` raises alone where the two in a row do."""
    sizes: list[list[int]] = [[*base.shape], [-1], [2, -1], [-1, 2], [2, -1, 2], [1, -1, 1, 2]]
    count = 0
    for first in sizes:
        for second in sizes:
            try:
                want = base.view(first).view(second)
            except RuntimeError:
                continue
            count += 1
            got = base.view(second)
            assert got.stride() == want.stride() or not base.numel() and got.shape == want.shape
    assert count or not base.numel()
