"""Convolutions whose images have their channels last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile import compat
from megacompile.passes.stages.channels_last import lay_channels_last

aten = torch.ops.aten


class Bottleneck(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 3, 2, 1)
        x = x + F.relu(self.norm(self.second(x)))
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


def flat(x: Tensor, model: Bottleneck) -> Tensor:
    """A view that images with their channels last have not."""
    images: Tensor = model.second(model.first(x))
    return images.view(x.shape[0], -1).sum(1)


def sorted_rows(x: Tensor, model: Bottleneck) -> Tensor:
    """An operator of which nothing is known."""
    images: Tensor = model.second(model.first(x))
    return images.sort(-1).values.square().sum()


def transposed(x: Tensor, model: Bottleneck) -> Tensor:
    """The result is no image as it lay in memory, and is wanted as it was."""
    images: Tensor = model.second(model.first(x))
    return images.transpose(1, 3)


def plain(x: Tensor, model: Bottleneck) -> Tensor:
    logits: Tensor = model(x)
    return logits


def joint_of(
    function: Callable[[Tensor, Bottleneck], Tensor], model: Bottleneck, x: Tensor
) -> fx.GraphModule:
    params = dict(model.named_parameters())

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        *values, image = primals
        held = dict(zip(params, values, strict=True))
        out = torch.func.functional_call(
            _Calls(model, function), {f"model.{k}": v for k, v in held.items()}, (image,)
        )
        gradients = torch.autograd.grad(out, values, tangents, allow_unused=True)
        return [out, *(g for g in gradients if g is not None)]

    primals = [*params.values(), x]
    shape = _Calls(model, function)(x).shape
    table = compat.inductor_decompositions()
    with compat.fake_mode() as mode:
        fakes = [mode.from_tensor(p) for p in primals]
        tangents = [mode.from_tensor(torch.ones(shape))]
        return compat.trace(joint, fakes, tangents, table)


class _Calls(nn.Module):
    def __init__(self, model: Bottleneck, function: Callable[[Tensor, Bottleneck], Tensor]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.model)


def strides(module: fx.GraphModule, target: Any) -> list[bool]:
    nodes = module.graph.find_nodes(op="call_function", target=target)
    return [n.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last) for n in nodes]


@pytest.mark.parametrize("function", [plain, flat, sorted_rows, transposed])
def test_results_are_as_they_were(function: Callable[[Tensor, Bottleneck], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Bottleneck().eval(), torch.randn(2, 3, 16, 16)
    joint = joint_of(function, model, x)
    laid = lay_channels_last(joint)
    assert laid is not joint
    for target in (aten.convolution.default, aten.convolution_backward.default):
        assert all(strides(laid, target)) and not all(strides(joint, target))
    given = [*model.parameters(), x, torch.ones(_Calls(model, function)(x).shape)]
    with torch.no_grad():
        before, after = joint(*given), laid(*given)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    metas = [
        [
            (n.meta["val"].shape, n.meta["val"].stride())
            for n in m.graph.output_node().all_input_nodes
        ]
        for m in (joint, laid)
    ]
    assert metas[0] == metas[1]


def test_between_convolutions_nothing_is_copied() -> None:
    model, x = Bottleneck(), torch.randn(2, 3, 16, 16)
    laid = lay_channels_last(joint_of(plain, model, x))
    copies = [
        n
        for n in laid.graph.find_nodes(op="call_function", target=aten.clone.default)
        if n.meta["val"].ndim == 4 and n.meta["val"].shape[0] == len(x)
    ]
    # the batch, and what the pool's backward takes as a table
    assert len(copies) <= 2


def test_a_graph_without_convolutions_is_left() -> None:
    joint = joint_of(
        lambda x, m: m.head(x.mean((2, 3)) @ x.new_ones(3, 128)),
        Bottleneck(),
        torch.randn(2, 3, 4, 4),
    )
    assert lay_channels_last(joint) is joint
