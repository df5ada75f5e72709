"""`inline_checkpoints`: the bodies of activation checkpoints stand where their calls stood."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megacompile.ir.capture import Capture
from megacompile.passes.capture.inline import inline_checkpoints
from tests.capturing import Net, capture

X = torch.linspace(-1, 1, 8).view(2, 4)


def inlined(function: Any) -> Capture:
    """A net of one layer that is called as `function(net, x)`; its outputs stay the same."""
    captured = capture(Net(function, depth=1), X)
    before = str(captured.capture.module.graph)
    after = inline_checkpoints(captured.capture)
    assert str(captured.capture.module.graph) == before, "its input is as it was"
    (got,), want = after.module(*captured.inputs), captured.model(X)
    assert torch.equal(got, want)
    return after


def operators(of: Capture) -> str:
    nodes = [n for n in of.module.graph.nodes if n.op in ("call_function", "call_method")]
    return " ".join(str(getattr(n.target, "__name__", n.target)) for n in nodes)


def test_a_body_takes_the_place_of_its_call() -> None:
    """The docstring's example."""

    def function(net: Net, x: Tensor) -> Any:
        return checkpoint(net.embed, x, use_reentrant=False)

    assert operators(inlined(function)) == "linear"


def test_bodies_within_bodies() -> None:
    """The graphs of a branch within them are found under their longer names."""

    def function(net: Net, x: Tensor) -> Any:
        def inner(y: Tensor) -> Any:
            return torch.cond(y.sum() > 0, torch.sin, torch.exp, (y,))

        def outer(y: Tensor) -> Any:
            return torch.cos(checkpoint(inner, y, use_reentrant=False))

        return net.head(checkpoint(outer, x, use_reentrant=False))

    assert operators(inlined(function)) == "sum gt cond getitem cos linear"


def test_several_results_and_keywords() -> None:
    def function(net: Net, x: Tensor) -> Any:
        def pair(y: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
            return y * scale, y.sin()

        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        one, other = checkpoint(pair, x, scale=x.cos(), **options)
        return F.linear(one - other, net.head.weight)

    assert operators(inlined(function)) == "cos mul sin sub linear"


def test_a_graph_without_checkpoints_is_left_as_it_is() -> None:
    captured = capture(Net(Net.chain), X).capture
    assert inline_checkpoints(captured) is captured
