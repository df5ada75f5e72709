"""Inputs that a captured graph changes in place: later uses give the plain model's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from tests.zoo import equal

Change = Callable[["Layer", Tensor], None]


def scaled(layer: Layer, x: Tensor) -> None:
    x.mul_(1.5)


def drawn(layer: Layer, x: Tensor) -> None:
    x *= torch.empty_like(x).uniform_(0.5, 1.5)


def by_a_parameter(layer: Layer, x: Tensor) -> None:
    x.add_(layer.other(x * 2))


def in_part(layer: Layer, x: Tensor) -> None:
    x[:, :3] = layer.other(x * 2)[:, :3]


def unrecorded(layer: Layer, x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(1.5)


def detached(layer: Layer, x: Tensor) -> None:
    x.detach().mul_(1.5)


CHANGES = [scaled, drawn, by_a_parameter, in_part, unrecorded, detached]


class Layer(nn.Module):
    """Changes its input, and hands on something else."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        out: Tensor = self.linear(x).tanh()
        return out


class Broken(nn.Module):
    """The input of a captured graph is a value, or a view of one, of the graph before it."""

    def __init__(self, change: Change, *, view: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layer, self.view = Layer(change), view

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * 2
        if self.view:
            hidden = hidden.view(-1, 8)
        torch._dynamo.graph_break()
        gate = self.layer(hidden)
        torch._dynamo.graph_break()
        loss: Tensor = (self.last(hidden) * gate).square().mean()
        return loss


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    streamed = megacompile(copy.deepcopy(model), device="cpu", lowering="eager", progress=False)
    return model, streamed


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(plain: nn.Module, streamed: nn.Module) -> None:
    mine, theirs = gradients(plain), gradients(streamed)
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        assert equal(gradient, theirs[name]), name


@pytest.mark.parametrize("change", CHANGES)
def test_a_value_of_the_user(change: Change) -> None:
    torch.manual_seed(0)
    given, found = torch.randn(5, 8), []
    models = pair(Layer(change))
    for _ in range(2):
        for model in models:
            torch.manual_seed(1)
            x = given.clone().requires_grad_()
            hidden = x * 2
            out = model(hidden)
            (out.sum() + hidden.square().sum()).backward()
            found.append((hidden.detach(), x.grad))
    check(*models)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert all(map(equal, one, other))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("view", [False, True])
def test_between_graph_breaks(change: Change, *, view: bool) -> None:
    torch.manual_seed(0)
    x, losses = torch.randn(5, 8), []
    models = pair(Broken(change, view=view))
    for _ in range(2):
        for model in models:
            torch.manual_seed(1)
            losses.append(model(x))
            losses[-1].backward()
    assert losses[0] == losses[1] and losses[2] == losses[3]
    check(*models)


def test_what_requires_no_grad_before() -> None:
    """A sum that a model adds to: its gradients come through the sum alone."""
    torch.manual_seed(0)
    x = torch.randn(5, 8)

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, total: Tensor) -> None:
            total += self.linear(x)

    models = pair(Adds())
    for model in models:
        total = torch.zeros(5, 8)
        for _ in range(3):
            model(x, total)
        total.square().sum().backward()
    check(*models)


def test_the_input_itself_comes_back() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x += self.linear(x * 2)
            return x

    torch.manual_seed(0)
    given = torch.randn(5, 8, requires_grad=True)
    models = pair(Gives())
    for model in models:
        hidden = given * 2
        out = model(hidden)
        assert out is hidden
        out.mul_(3)
        hidden.square().sum().backward()
    check(*models)


def test_a_leaf_under_no_grad() -> None:
    torch.manual_seed(0)
    given = torch.randn(5, 8)
    models, found = pair(Layer(unrecorded)), []
    for model in models:
        x = given.clone().requires_grad_()
        model(x).sum().backward()
        found.append((x.detach(), x.grad))
    check(*models)
    assert all(map(equal, *found))


@pytest.mark.filterwarnings("ignore:megacompile")
def test_inputs_that_share_memory() -> None:
    """Those that come to require grad together run in eager mode."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, total: Tensor, part: Tensor) -> Tensor:
            out = part * 2
            total += self.linear(x)
            return out

    torch.manual_seed(0)
    x = torch.randn(5, 8)
    models = pair(Adds())
    for model in models:
        total = torch.zeros(5, 8)
        part = model(x, total, total[:2])
        (part.sum() + total.square().sum()).backward()
    check(*models)
