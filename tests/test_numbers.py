"""Streamed equals plain: bitwise with the eager lowering, within rounding with Inductor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules
from tests import cases

CPU = torch.device("cpu")
GPU = torch.device("cuda")


PLANS: dict[str, dict[str, Any]] = {
    "streamed": {"resident": 0, "activations": "recompute"},
    "planned": {},  # on a GPU with room, all of it lives there
}


def both(
    name: str, device: torch.device, lowering: str, **options: Any
) -> tuple[nn.Module, nn.Module, cases.Case]:
    """A plain copy of a case's model on `device`, the streamed one, and the case."""
    case = cases.build(name)
    plain = copy.deepcopy(case.model).to(device)
    streamed = megacompile(case.model, device=device, lowering=lowering, **options)
    return plain, streamed, case


def step(model: nn.Module, case: cases.Case, i: int, device: torch.device) -> Tensor:
    """Forward and backward on step `i`'s data, with that step's seed."""
    torch.manual_seed(i)
    loss = case.loss(model, i, device)
    loss.backward()
    return loss.detach()


def assert_same(plain: nn.Module, streamed: nn.Module) -> None:
    """Every gradient and every buffer is the same, bit for bit."""
    for (name, want), got in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        assert (want.grad is None) == (got.grad is None), f"{name}: gradient missing or unasked for"
        if want.grad is not None and got.grad is not None:
            assert torch.equal(want.grad.cpu(), got.grad.cpu()), f"gradient of {name}"
    for (name, before), after in zip(plain.named_buffers(), streamed.buffers(), strict=True):
        assert torch.equal(before, after), f"buffer {name}"


@pytest.mark.parametrize("name", cases.CASES)
def test_bitwise_on_the_cpu(name: str) -> None:
    _bitwise(name, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", cases.CASES)
def test_bitwise_on_the_gpu(name: str, plan: str) -> None:
    """The second step of a planned model is one on buckets that have moved to the device."""
    streamed = _bitwise(name, GPU, **PLANS[plan])
    places = {param.device.type for param in streamed.parameters()}
    wanted = {"cpu"} if plan == "streamed" else {"cuda"}
    if name == "graph break":  # the plan is of the first captured graph
        wanted |= {"cpu"}
    assert places == wanted


def _bitwise(name: str, device: torch.device, **options: Any) -> nn.Module:
    plain, streamed, case = both(name, device, "eager", **options)
    for i in range(2):  # the second accumulates into the first
        want, got = step(plain, case, i, device), step(streamed, case, i, device)
        assert torch.equal(want, got), f"loss {i}"
        assert_same(plain, streamed)
    assert schedules(streamed), "nothing was scheduled"
    return streamed


@pytest.mark.parametrize("name", ["demo gpt", "hf qwen2", "batch norm", "tied", "dropout"])
def test_ten_adamw_steps_are_bitwise_on_the_cpu(name: str) -> None:
    """With clipping that triggers and that does not, two micro-batches a step, a scheduler."""
    plain, streamed, case = both(name, CPU, "eager")
    for model in (plain, streamed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
        for i in range(10):
            for micro in range(2):
                torch.manual_seed(10 * i + micro)
                (case.loss(model, 2 * i + micro, CPU) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1 if i % 2 else 100.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    for (name, want), got in zip(plain.named_parameters(), streamed.parameters(), strict=True):
        assert torch.equal(want, got), name


@pytest.mark.parametrize("name", ["demo gpt", "batch norm"])
def test_inductor_on_the_cpu(name: str) -> None:
    _within_rounding(name, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in cases.CASES if n not in ("dropout", "hf gpt2")])
def test_inductor_on_the_gpu(name: str) -> None:
    _within_rounding(name, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["demo gpt", "hf qwen2", "tied", "frozen half"])
def test_tiles_on_the_gpu(name: str) -> None:
    _within_rounding(name, GPU, tiles=4)


def _within_rounding(name: str, device: torch.device, **options: Any) -> None:
    """Within 1e-5 relative in fp32; where a gradient is only rounding, of the largest one."""
    plain, streamed, case = both(name, device, "inductor", **options)
    want, got = step(plain, case, 0, device), step(streamed, case, 0, device)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    pairs = {
        label: (p.grad.cpu(), q.grad.cpu())
        for (label, p), q in zip(plain.named_parameters(), streamed.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    }
    assert len(pairs) == sum(q.grad is not None for q in streamed.parameters())
    largest = max(float(p.norm()) for p, _ in pairs.values())
    for label, (p, q) in pairs.items():
        error = float((p - q).norm()) / max(float(p.norm()), 1e-2 * largest)
        assert error < 1e-5, f"gradient of {label}: relative error {error:.1e}"


@pytest.mark.gpu
def test_inductor_draws_the_same_dropout_mask_in_the_recompute() -> None:
    """Where an output is zeroed by dropout, so is the gradient: one mask for both."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.5)) for _ in range(3)))
    with torch.no_grad():
        for layer in model:
            layer[0].weight.copy_(torch.eye(256))  # type: ignore[index]
            layer[0].bias.zero_()  # type: ignore[index]
    streamed = megacompile(model, device="cuda", lowering="inductor")
    x = torch.ones(64, 256, device="cuda", requires_grad=True)
    out = streamed(x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, out != 0)
    assert 0.08 < (out != 0).float().mean() < 0.17  # 0.5 ** 3
