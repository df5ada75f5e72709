"""Outputs of a graph that are changed in place behind it: as in the plain model, or refused."""

from __future__ import annotations

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
