"""`strides`: between stages values have the strides that the plain model's have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules

X = torch.linspace(-1, 1, 2 * 8 * 12 * 12).view(2, 8, 12, 12)


class Block(nn.Module):
    """Its convolution's kernel follows the strides of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(torch.nn.functional.silu(self.norm(x)))
        return x + y


class Norm(nn.Module):
    """Ends with what its fake kernel lies about."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


class Net(nn.Module):
    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Norm(), Block(), Norm(), Block(), Block()])
        self.channels_last = channels_last

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_last:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)  # neither of torch's two orders
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_the_same_bits_and_strides_as_the_plain_model(channels_last: bool, train: bool) -> None:
    torch.manual_seed(0)
    plain = Net(channels_last).train(train)
    model = megacompile(copy.deepcopy(plain), progress=False)
    real: list[Any] = []
    for layer in plain.layers:
        layer.register_forward_hook(lambda _, args, out: real.append(out.stride()))
    with torch.set_grad_enabled(train):
        want, got = plain(X), model(X)
    assert torch.equal(got, want) and got.stride() == want.stride()
    (schedule,) = schedules(model)
    assert [stage.outputs[0].stride for stage in schedule.stages][-5:] == real
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
