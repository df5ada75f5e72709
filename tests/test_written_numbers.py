"""Numbers as FX writes them: powers of negative ones (`compat.write_powers`), their methods."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile

CASES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "of a tensor": lambda x, k: x * (-1) ** torch.arange(4),
    "of a float": lambda x, k: x * (-0.5) ** torch.arange(4),
    "of a condition": lambda x, k: x * (-2) ** (x > 0).long(),
    "of a size": lambda x, k: x * (-1) ** x.shape[0],
    "of an argument": lambda x, k: x * (-1) ** k,
    "of more": lambda x, k: x * ((-1) ** (k + 1) + (-3) ** (k // 2)),
    "a method of a number": lambda x, k: x + k.bit_length() + k.__add__(1),
    "a base that is a number later": lambda x, k: x[:, : (k - 3) ** 2 % 4 + 1],
}


class Alternates(nn.Module):
    def __init__(self, case: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.case = case
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor, k: int) -> Tensor:
        return self.case(self.layers(x), k)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("case", CASES)
def test_as_the_plain_model(case: str, lowering: str) -> None:
    plain = Alternates(CASES[case])
    model = megacompile(copy.deepcopy(plain), device="cpu", lowering=lowering)
    for k in range(2, 7):
        x = torch.randn(k, 4)
        got, expected = model(x, k), plain(x, k)
        got.square().sum().backward()
        expected.square().sum().backward()
        tolerance = None if lowering == "inductor" else 0.0
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=tolerance, atol=tolerance)
