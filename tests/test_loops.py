"""Training loops that do something unusual between forward, backward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.zoo import twins


class Product(nn.Module):
    """Three parameters of a bucket side by side, and a second bucket of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Factors() for _ in range(2))

    def forward(self, x: Tensor, skip: str = "") -> Tensor:
        for layer in self.layers:
            x = layer(x, skip)
        return x.square().mean()


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.rand(300) + 0.5) for _ in range(3))

    def forward(self, x: Tensor, skip: str) -> Tensor:
        x = self.a * x + self.c
        return x if skip else x * self.b


Act = Callable[[Any, Optimizer], None]
CONFIGS: dict[str, dict[str, Any]] = {
    "eager": {"lowering": "eager"},
    "inductor": {"lowering": "inductor", "device_update": 0},
    "handed over": {"lowering": "inductor", "device_update": 1.0},
    "resident": {"lowering": "inductor", "resident": "all"},
}


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def compare(
    config: str, loop: Act, make: Callable[[nn.Module], Optimizer] = adamw, before: int = 3
) -> None:
    """The same loop on a plain and on a streamed model, behind some ordinary steps."""
    torch.manual_seed(0)
    plain, streamed = twins(Product(), progress=False, **CONFIGS[config])
    for model in (plain, streamed):
        optimizer = make(model)
        for i in range(before):
            backward(model, i)
            optimizer.step()
            optimizer.zero_grad()
        loop(model, optimizer)
    for (name, want), got in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        want, got = want.detach(), got.detach()
        assert float((got - want).norm()) <= 1e-5 * float(want.norm()), name


def backward(model: nn.Module, i: int, skip: str = "") -> None:
    x = torch.rand(4, 300, generator=torch.Generator().manual_seed(i))
    model(x, skip).backward()


def frozen_midway(model: Any, optimizer: Optimizer) -> None:
    model.layers[0].b.requires_grad_(False)
    backward(model, 5)
    optimizer.step()


def unused_for_once(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5, skip="b")
    optimizer.step()


def gradient_taken_away(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    model.layers[0].b.grad = None
    optimizer.step()


def data_replaced(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    model.layers[0].b.data = model.layers[0].b.data * 1.1
    optimizer.step()


def data_swapped(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    a, b = model.layers[0].a, model.layers[1].a
    a.data, b.data = b.data, a.data
    optimizer.step()


def written_by_an_alias_that_is_gone(model: Any, optimizer: Optimizer) -> None:
    aliases = list(model.state_dict().values())
    backward(model, 5)
    for alias in aliases:
        alias.mul_(0.5)
    del alias, aliases
    optimizer.step()


def states_written_by_an_alias_that_is_gone(model: Any, optimizer: Optimizer) -> None:
    states = [optimizer.state[p]["exp_avg"].data for p in model.parameters()]
    backward(model, 5)
    for state in states:
        state.mul_(0.5)
    del state, states
    optimizer.step()


def gradients_scaled_by_an_alias(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    views = [p.grad.data for p in model.parameters()]
    backward(model, 6)
    for view in views:
        view.mul_(0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()


def gradients_swapped(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    a, b = model.layers[0].a, model.layers[1].c
    a.grad, b.grad = b.grad, a.grad
    backward(model, 6)
    optimizer.step()


def hook_registered_late(model: Any, optimizer: Optimizer) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in model.parameters():
            param.grad.mul_(0.01)

    optimizer.register_step_pre_hook(halve)
    backward(model, 5)
    optimizer.step()


LOOPS = [
    frozen_midway,
    unused_for_once,
    gradient_taken_away,
    data_replaced,
    data_swapped,
    written_by_an_alias_that_is_gone,
    states_written_by_an_alias_that_is_gone,
    gradients_scaled_by_an_alias,
    gradients_swapped,
    hook_registered_late,
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(loop: Act, config: str) -> None:
    compare(config, loop)


def _switched(option: str, off: Any, on: Any) -> Act:
    def loop(model: Any, optimizer: Optimizer) -> None:
        for value in (off, on):
            for group in optimizer.param_groups:
                group[option] = value
            for i in range(3):
                backward(model, 5 + i)
                optimizer.step()
                optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("config", ["inductor", "resident"])
def test_options_switched_off_and_on(config: str) -> None:
    """A state that is there from before is not used, nor touched."""
    compare(
        config,
        _switched("amsgrad", False, False),
        lambda m: Adam(m.parameters(), lr=1e-2, amsgrad=True, betas=(0.9, 0.5)),
    )
    compare(config, _switched("momentum", 0, 0.9), lambda m: SGD(m.parameters(), 0.1, 0.9))


def test_a_copy_follows_a_parameter_that_has_another_name() -> None:
    _, streamed = twins(nn.Sequential(nn.Linear(8, 8)), compute_dtype=torch.bfloat16)
    x = torch.rand(4, 8)
    alias = streamed[0].weight.data
    with torch.no_grad():
        before = streamed(x)
        alias.mul_(0.0)
        del alias
        assert not torch.equal(before, streamed(x))
