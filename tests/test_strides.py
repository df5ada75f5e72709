"""`strides`: between stages values have the strides that the plain model's have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules

X = torch.linspace(-1, 1, 8 * 12 * 12).view(1, 8, 12, 12)


class Mix(nn.Module):
    """As the attention of an autoencoder: its output's pixels lie one behind the other.

    The stride of the batch, of which there is one, is that of the sum's kernel, and no fake one's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(2).transpose(1, 2))
        return y.transpose(-1, -2).reshape(x.shape) + x


class Block(nn.Module):
    """The group norm goes by the strides that it gets, and the convolution by what that gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(torch.nn.functional.silu(self.norm(x)))
        return y + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Mix(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("train", [False, True])
def test_the_same_bits_and_strides_as_the_plain_model(train: bool) -> None:
    torch.manual_seed(0)
    plain = Net().train(train)
    model = megacompile(copy.deepcopy(plain), progress=False)
    real: list[Any] = []
    for layer in plain.layers:
        layer.register_forward_hook(lambda _, args, out: real.append(out.stride()))
    with torch.set_grad_enabled(train):
        want, got = plain(X), model(X)
    (schedule,) = schedules(model)
    assert [stage.outputs[0].stride for stage in schedule.stages] == real
    assert torch.equal(got, want) and got.stride() == want.stride()
    if train:
        want.square().sum().backward()
        got.square().sum().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_what_cannot_run_on_zeros_stays_as_it_is() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4) * 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.linalg.inv(self.weight) @ x
            return y

    model = megacompile(Inverse(), progress=False)
    assert torch.equal(model(torch.eye(4)), torch.eye(4) / 2)
