"""Loops that call the model in an autocast: code that was traced there has its casts already."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile


class Island(nn.Module):
    """A part of it computes in float32 all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            result: Tensor = self.second(hidden.float()).square().mean()
        return result


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]  # type: ignore[union-attr]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_what_leaves_autocast_computes_in_float32(lowering: str) -> None:
    torch.manual_seed(0)
    model, x = Island(), torch.randn(8, 64)
    plain = trained(copy.deepcopy(model), x)
    found = trained(megacompile(model, device="cpu", lowering=lowering), x)
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(
            ours,
            theirs,
            rtol=0 if lowering == "eager" else 1e-2,
            atol=0 if lowering == "eager" else 1e-4,
        )
