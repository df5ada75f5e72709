"""Custom operators whose backwards ask for data are scheduled, with the plain model's bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import inside
from tests.zoo import differences, equal, twins

NAME = "megacompile_tests::grouped"


def grouped(x: Tensor, weight: Tensor, ends: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Rows up to each end times a matrix each, and how many rows each has."""
    made, begin, counts = x.new_zeros(x.shape[0], weight.shape[2]), 0, torch.zeros_like(ends)
    for i, end in enumerate(ends.tolist()):
        made[begin:end] = x[begin:end] @ weight[i] * scale
        counts[i] = end - begin
        begin = end
    return made, counts


def keep(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.scale = keyword_only_inputs["scale"]


def gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    x, weight, ends = ctx.saved_tensors
    grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
    grad_weight, begin = torch.zeros_like(weight), 0
    for i, end in enumerate(ends.tolist()):
        if grad_x is not None:
            grad_x[begin:end] = grad[begin:end] @ weight[i].t() * ctx.scale
        grad_weight[i] = x[begin:end].t() @ grad[begin:end] * ctx.scale
        begin = end
    return grad_x, grad_weight, None


@pytest.fixture(scope="module", autouse=True)
def operator() -> Iterator[Any]:
    schema = "(Tensor x, Tensor weight, Tensor ends, *, float scale=0.5) -> (Tensor, Tensor)"
    made = torch.library.custom_op(NAME, grouped, mutates_args=(), schema=schema)
    made.register_fake(
        lambda x, weight, ends, scale=0.5: (
            x.new_empty(x.shape[0], weight.shape[2]),
            torch.empty_like(ends),
        )
    )
    made.register_autograd(gradients, setup_context=keep)
    yield made


class Experts(nn.Module):
    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4) if first else nn.Identity()
        self.weight = nn.Parameter(torch.randn(3, 4, 5))
        self.last = nn.Linear(5, 2)
        self.scale = 0.25 if first else 0.5  # the operator's own

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y, counts = torch.ops.megacompile_tests.grouped(
            self.first(x), self.weight, ends, scale=0.25
        )
        out: Tensor = self.last(y).square().mean() * counts[0]
        return out


@pytest.mark.parametrize("first", [True, False])
def test_a_backward_that_asks_for_data(first: bool) -> None:
    streamed: nn.Module
    plain, streamed = twins(Experts(first=first))
    for rows in (6, 8, 11, 7):
        x = torch.linspace(-1, 1, rows * 4).view(rows, 4)
        ends = torch.tensor([rows // 3, rows // 2, rows])
        losses = [trained(x, ends) for trained in (plain, streamed)]
        for loss in losses:
            loss.backward()
        assert equal(*losses)
    assert differences(plain, streamed) == []
    assert len(inside.programs(streamed)) == 2
