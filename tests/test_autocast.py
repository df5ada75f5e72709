"""Loops that call the model in an autocast: code that was traced there has its casts already."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megacompile import megacompile


class Island(nn.Module):
    """A part of it computes in float32 all the same."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.autocast(self.device, enabled=False):
            result: Tensor = self.second(hidden.float()).square().mean()
        return result


class Attention(nn.Module):
    """Which the CPU computes in float32, where there is dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(64, 3 * 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.values(x).view(1, 8, 3, 2, 32).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return heads.float().square().mean()


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss and the gradients."""
    torch.manual_seed(1)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


@pytest.mark.parametrize(
    ("module", "options", "tolerance"),
    [
        (Island, {"lowering": "eager"}, 0.0),
        (Island, {"lowering": "inductor"}, 1e-2),
        (Attention, {"lowering": "eager"}, 0.0),
        (Attention, {"lowering": "eager", "activations": "keep"}, 0.0),
    ],
)
def test_what_leaves_autocast_computes_in_float32(
    module: type[nn.Module], options: dict[str, Any], tolerance: float
) -> None:
    torch.manual_seed(0)
    model, x = module(), torch.randn(8, 64)
    plain = trained(copy.deepcopy(model), x)
    found = trained(megacompile(model, device="cpu", **options), x)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.gpu
@pytest.mark.parametrize(("lowering", "tolerance"), [("eager", 0.0), ("inductor", 1e-2)])
def test_on_a_gpu(lowering: str, tolerance: float) -> None:
    torch.manual_seed(0)
    model, x = Island("cuda"), torch.randn(8, 64, device="cuda")
    plain = trained(copy.deepcopy(model).cuda(), x)
    found = trained(megacompile(model, lowering=lowering), x)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours.cuda(), theirs, rtol=tolerance, atol=tolerance / 100)
