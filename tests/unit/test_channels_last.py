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
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class Bottleneck(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 128, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(128, 128, 3, padding=1)
        self.norm = nn.BatchNorm2d(128)
        self.head = nn.Linear(128, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)

    def images(self, x: Tensor) -> Tensor:
        images: Tensor = self.second(self.first(x))
        return images

    def plain(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 3, 2, 1)
        x = x + F.relu(self.norm(self.second(x)))
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out

    def flat(self, x: Tensor) -> Tensor:
        """A view that images with their channels last have not."""
        return self.images(x).view(x.shape[0], -1).sum(1)

    def sorted_rows(self, x: Tensor) -> Tensor:
        """An operator of which nothing is known."""
        return self.images(x).sort(-1).values.square().sum()

    def transposed(self, x: Tensor) -> Tensor:
        """The result is no image as it lay in memory, and is wanted as it was."""
        return self.images(x).transpose(1, 3)

    def without(self, x: Tensor) -> Tensor:
        """No convolution at all."""
        out: Tensor = self.head(x.mean((2, 3)) @ x.new_ones(3, 128))
        return out


def joint_of(model: Bottleneck, x: Tensor) -> fx.GraphModule:
    params = dict(model.named_parameters())

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        *values, image = primals
        held = dict(zip(params, values, strict=True))
        out = torch.func.functional_call(model, held, (image,))
        gradients = torch.autograd.grad(out, values, tangents, allow_unused=True)
        return [out, *(g for g in gradients if g is not None)]

    with compat.fake_mode() as mode:
        fakes = [mode.from_tensor(p) for p in (*params.values(), x)]
        tangents = [mode.from_tensor(torch.ones_like(model(x)))]
        return compat.trace(joint, fakes, tangents, compat.inductor_decompositions())


def nodes(module: fx.GraphModule, *targets: Any) -> list[Any]:
    return [n for n in module.graph.nodes if n.target in targets]


def laid_out(module: fx.GraphModule) -> list[bool]:
    images = [n.args[0].meta["val"] for n in nodes(module, *CONVOLUTIONS)]
    return [image.is_contiguous(memory_format=torch.channels_last) for image in images]


def results(module: fx.GraphModule) -> list[Any]:
    values = [n.meta["val"] for n in module.graph.output_node().all_input_nodes]
    return [(value.shape, value.stride()) for value in values]


@pytest.mark.parametrize("name", ["plain", "flat", "sorted_rows", "transposed"])
def test_results_are_as_they_were(name: str) -> None:
    model, x = Bottleneck(getattr(Bottleneck, name)).eval(), torch.randn(2, 3, 16, 16)
    joint = joint_of(model, x)
    laid = lay_channels_last(joint)
    assert laid is not joint and all(laid_out(laid)) and not all(laid_out(joint))
    assert results(laid) == results(joint)
    with torch.no_grad():
        given = [*model.parameters(), x, torch.ones_like(model(x))]
        for old, new in zip(joint(*given), laid(*given), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)


def test_between_convolutions_nothing_is_copied() -> None:
    """But the batch, and what the pool's backward takes as a table."""
    x = torch.randn(2, 3, 16, 16)
    laid = lay_channels_last(joint_of(Bottleneck(Bottleneck.plain), x))
    clones = [n.meta["val"] for n in nodes(laid, aten.clone.default)]
    assert sum(clone.ndim == 4 and clone.shape[0] == len(x) for clone in clones) <= 2


def test_a_graph_without_convolutions_is_left() -> None:
    joint = joint_of(Bottleneck(Bottleneck.without), torch.randn(2, 3, 4, 4))
    assert lay_channels_last(joint) is joint
