"""`p.data` that the user exchanges for a while, as an average of the weights is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from tests import inside

OPTIONS: dict[str, dict[str, Any]] = {
    "all streamed": {"resident": 0, "activations": "recompute"},
    "masters": {"compute_dtype": torch.bfloat16},
    "resident": {"resident": "all", "gpu_memory": "1GiB"},
}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def trained(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    """Four steps, with an evaluation of the average behind each: outputs, then weights."""
    model = wrap(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = [p.data.clone() for p in model.parameters()]
    x, found = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), []
    for _ in range(4):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        backup = []
        for i, p in enumerate(model.parameters()):
            average[i] = average[i] * 0.9 + p.data * 0.1
            backup.append(p.data)
            p.data = average[i]
        with torch.no_grad():
            found.append(model(x))
        for p, before in zip(model.parameters(), backup, strict=True):
            p.data = before
    return found + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", ["all streamed", "resident"])
@pytest.mark.filterwarnings("ignore:megacompile")
def test_an_average_that_is_evaluated(options: str) -> None:
    plain = trained(lambda m: m)
    ours = trained(lambda m: megacompile(m, device="cpu", lowering="eager", **OPTIONS[options]))
    for want, got in zip(plain, ours, strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:megacompile")
def test_an_exchange_there_and_back(options: str) -> None:
    model = megacompile(small(), device="cpu", lowering="eager", **OPTIONS[options])
    x = torch.ones(3, 4)
    first = model(x)
    first.sum().backward()
    others = [torch.zeros_like(p) for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]

    def exchange() -> None:
        for p, other in zip(model.parameters(), others, strict=True):
            p.data, other.data = other.data, p.data

    exchange()
    with torch.no_grad():
        assert not model(x).any(), "these are the others"
    exchange()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not any(other.any() for other in others)
    assert torch.equal(model(x), first)


def test_what_nobody_holds_is_overwritten() -> None:
    """No memory is made for new values alone."""
    model = megacompile(small(), device="cpu", lowering="eager", resident=0)
    x = torch.ones(3, 4)
    model(x).sum().backward()
    buckets = list(inside.streamed(model).machine.buckets.values())
    for p in model.parameters():
        p.data = torch.ones_like(p)
    model(x)
    assert list(inside.streamed(model).machine.buckets.values()) == buckets
    assert all((p == 1).all() for p in model.parameters())


def to_backup(model: nn.Module, backup: list[Tensor]) -> None:
    """SAM: up the gradient, and back before the step, which has the gradient from there."""
    backup[:] = [p.data.clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.add_(0.05 * p.grad)
    model.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    for p, before in zip(model.parameters(), backup, strict=True):
        p.data = before


def to_average(model: nn.Module, backup: list[Tensor]) -> None:
    """LocalSGD: the average over the processes, which one variable holds."""
    backup[:] = [p.data * 0.5 for p in model.parameters()]
    for p, average in zip(model.parameters(), backup, strict=True):
        p.data = average


@pytest.mark.parametrize("change", [to_backup, to_average])
def test_data_that_is_set_in_each_step_is_no_flat_buffer(
    change: Callable[[nn.Module, list[Tensor]], None], recwarn: pytest.WarningsRecorder
) -> None:
    found = []
    for model in (small(), megacompile(small(), device="cpu", lowering="eager")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        backup: list[Tensor] = []
        for i in range(4):
            model(torch.full((3, 4), i + 1.0)).square().sum().backward()
            change(model, backup)
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
    assert [w for w in recwarn if "megacompile" in str(w.message)] == []
