"""float16 for cards without bfloat16: autocast, a GradScaler whose first steps overflow, clipping,
and lengths that change, next to the plain loop."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from megacompile import megacompile
from tests.zoo import WIDTH, Block, Stack

STEPS = 10


class Ran(NamedTuple):
    """What a loop leaves."""

    losses: list[float]
    scales: list[float]  # after each step; a smaller one than before: the step was skipped
    params: list[torch.Tensor]


def train(model: nn.Module, device: str) -> Ran:
    """Ten steps over two micro-batches each, whose lengths change."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=4)
    losses, scales = [], []
    for k in range(STEPS):
        for micro in range(2):
            generator = torch.Generator().manual_seed(2 * k + micro)
            x = torch.randn(2, 3 + (k + micro) % 4, WIDTH, generator=generator).to(device)
            with torch.autocast(device, torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return Ran(losses, scales, [p.detach().cpu().clone() for p in model.parameters()])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"resident": 0}, {"resident": 0, "state_dtype": "int8"}],
    ids=["planned", "streamed", "8-bit states"],
)
def test_the_plain_loop_with_a_grad_scaler(options: dict[str, Any], device: str) -> None:
    torch.manual_seed(0)
    plain = Stack(layers=4, block=lambda: Block(dropout=0.0))
    model = megacompile(copy.deepcopy(plain), device=device, **options)
    wanted, found = train(plain.to(device), device), train(model, device)
    assert found.scales == wanted.scales
    skipped = [b < a for a, b in zip([2.0**24, *wanted.scales], wanted.scales, strict=False)]
    assert any(skipped) and not all(skipped)
    assert all(torch.isfinite(p).all() for p in found.params)
    exact = device == "cpu" and "state_dtype" not in options
    rtol, atol = (0.0, 0.0) if exact else (0.05, 0.02)
    losses = torch.tensor(found.losses), torch.tensor(wanted.losses)
    for mine, theirs in (losses, *zip(found.params, wanted.params, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
