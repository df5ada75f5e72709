"""Outputs of a graph that are changed in place behind it: as in the plain model, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile import BackwardError
from tests.zoo import assert_same, equal, twins


class Masked(nn.Module):
    """Puts a parameter where the mask is, behind a graph break."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.first(x)
        other = hidden * 2
        if self.kind == "flat":
            hidden, mask = hidden.view(-1, 4), mask.view(-1)
        torch._dynamo.graph_break()
        hidden[mask] = self.token
        if self.kind == "both":
            other.mul_(3)
        total: Tensor = self.last(hidden).square().sum() + other.sum()
        return total


@pytest.mark.parametrize("kind", ["batched", "flat", "both"])
@pytest.mark.filterwarnings("ignore:megacompile")
def test_a_parameter_is_written_through_a_mask(kind: str) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Masked(kind))
    x, mask = torch.randn(2, 3, 4), torch.rand(2, 3) > 0.5
    for _ in range(2):
        losses = [model(x, mask) for model in (plain, streamed)]
        assert equal(*(loss.detach() for loss in losses))
        for loss in losses:
            loss.backward()
        assert_same(plain, streamed)


class Exponential(nn.Module):
    """Saves its output for its backward."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        result = torch.exp(self.layer(x))
        return result.flatten() if self.flat else result


@pytest.mark.parametrize("flat", [False, True])
def test_an_output_that_the_backward_needs(flat: bool) -> None:
    plain, streamed = twins(Exponential(flat=flat))
    x = torch.randn(2, 4)
    for model, error in ((plain, RuntimeError), (streamed, BackwardError)):
        out = model(x)
        out.mul_(2)
        with pytest.raises(error, match="in.?place"):
            out.sum().backward()
    for model in (plain, streamed):
        (model(x) * 2).sum().backward()
    assert_same(plain, streamed)


def test_an_output_that_the_backward_does_not_need() -> None:
    plain, streamed = twins(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    for model in (plain, streamed):
        out = model(x)
        out.mul_(2).add_(1)
        out.square().sum().backward()
    assert_same(plain, streamed)


class Scaled(nn.Module):
    """Divides in place what a captured graph of its own has made a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        torch._dynamo.graph_break()
        heads = hidden.view(2, 2, 2).transpose(0, 1)
        torch._dynamo.graph_break()
        heads /= 3.0
        torch._dynamo.graph_break()
        total: Tensor = self.last(heads.transpose(0, 1).reshape(2, 4)).square().sum()
        return total


def test_the_input_of_a_view_may_be_changed() -> None:
    """Its backward takes no value. (That of an exponential does: above.)"""
    torch.manual_seed(0)
    plain, streamed = twins(Scaled())
    x = torch.randn(2, 4)
    for model in (plain, streamed):
        model(x).backward()
    assert_same(plain, streamed)


class Dropped(nn.Module):
    """Drops out of a parameter: in eval that is the parameter itself, which leaves the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden, table = self.layer(x), F.dropout(self.table, 0.5, self.training)
        torch._dynamo.graph_break()
        total: Tensor = hidden + table
        return total


@pytest.mark.parametrize("grad", [False, True])
def test_a_parameter_is_an_output_after_all(grad: bool) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Dropped().eval())
    x = torch.randn(2, 4)
    with torch.set_grad_enabled(grad):
        outputs = [model(x) for model in (plain, streamed)]
    assert equal(*(output.detach() for output in outputs))
    if grad:
        for output in outputs:
            output.sum().backward()
        assert_same(plain, streamed)


class Keeper(nn.Module):
    """Keeps a view of a buffer, of a batch or of a value, which the same graph changes in place."""

    scale: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.kind = kind
        self.kept: Any = None

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        hidden = self.layer(x)
        torch._dynamo.graph_break()
        if self.kept is None or self.kind != "a buffer":
            views: dict[str, Callable[[], Tensor]] = {
                "a buffer": lambda: self.scale.view(2, 3).t()[1:],
                "a batch with gaps": lambda: batch.t()[1:],
                "a view behind the change": lambda: batch.mul_(0.5)[1:, :2],
                "a value": lambda: hidden.view(-1)[2:],
                "a detached value": lambda: hidden.detach().t(),
                "overlapping inputs": lambda: self.scale[1:3],
            }
            self.kept = views[self.kind]()
        self.scale.mul_(0.9)
        batch.add_(1)
        hidden.mul_(batch)
        total: Tensor = (hidden * self.scale[:4]).sum()
        return total


KINDS = ("a buffer", "a batch with gaps", "a view behind the change", "a value", "a detached value")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_view_of_what_the_graph_changes_follows_it(kind: str, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    models = twins(Keeper(kind), dynamic=dynamic)
    for rows in (3, 3, 5, 4):
        shown = []
        for model in models:
            x = torch.linspace(-1, 1, 4 * rows).view(rows, 4)
            batch = torch.arange(10.0 * rows).view(rows, 10)[:, 1:9:2]
            loss = model(x, batch)
            (loss + model.kept.square().sum()).backward()
            with torch.no_grad():
                model.kept.detach().mul_(0.5)
            shown.append([loss.detach(), model.kept.detach(), batch, *model.buffers()])
        assert all(map(equal, *shown))
        assert_same(*models)


def test_a_view_of_inputs_that_overlap_follows_them() -> None:
    torch.manual_seed(0)
    models = twins(Keeper("overlapping inputs"))
    shown = []
    for model in models:
        for _ in range(3):
            batch = model.scale[None, :4]
            loss = model(torch.ones(2, 4), batch)
            loss.backward()
        shown.append([loss.detach(), model.kept, model.scale])
    assert all(map(equal, *shown))


def test_a_view_of_what_a_backward_writes_follows_it() -> None:
    class Written(Keeper):
        def note(self, gradient: Tensor) -> None:
            self.scale.add_(gradient.sum())

        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            hidden = torch.tanh(self.layer(x))
            hidden.register_hook(self.note)
            if self.kept is None:
                self.kept = self.scale[:4]
            total: Tensor = (hidden * self.kept * self.scale[2:]).sum()
            return total

    torch.manual_seed(0)
    models = twins(Written(""))
    for _ in range(3):
        for model in models:
            model(torch.ones(2, 4), torch.ones(2, 4)).backward()
        assert equal(*(model.kept for model in models))
        assert_same(*models)
