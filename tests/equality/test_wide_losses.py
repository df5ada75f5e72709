"""With `compute_dtype`, losses are those of `torch.autocast`: in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import megacompile, schedules

Loss = Callable[[Tensor, Tensor], Tensor]
X, Y = torch.linspace(-1, 1, 32).view(4, 8), torch.tensor([0, 3, 1, 4])


class Net(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(8, 16), nn.Linear(16, 5), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(torch.relu(self.body(x))), y)


def _smooth(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, label_smoothing=0.1, weight=torch.ones_like(z[0]))


LOSSES: dict[str, Loss] = {
    "cross_entropy": F.cross_entropy,
    "weighted": _smooth,
    "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, 5).to(z.dtype)),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, -1), y),
    "mse": lambda z, y: F.mse_loss(z, torch.zeros_like(z)) + F.l1_loss(z, torch.ones_like(z)),
    "no loss": lambda z, y: z.sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_autocast(name: str) -> None:
    torch.manual_seed(0)
    plain = Net(LOSSES[name])
    model = megacompile(copy.deepcopy(plain), compute_dtype=torch.bfloat16, progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(X, Y)
    got = model(X, Y)
    assert got.dtype == want.dtype and torch.equal(got, want)
    want.backward()
    got.backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    (schedule,) = schedules(model)
    assert "losses" in [record.name for record in schedule.history]


def test_a_dtype_that_was_asked_for_stays() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return torch.log_softmax(z, -1, dtype=torch.float64).sum()

    model = megacompile(Net(loss), compute_dtype=torch.bfloat16, progress=False)
    assert model(X, Y).dtype == torch.float64


def test_without_compute_dtype_nothing_is_widened() -> None:
    model = megacompile(Net(F.cross_entropy).bfloat16(), progress=False)
    assert model(X.bfloat16(), Y).dtype == torch.bfloat16
