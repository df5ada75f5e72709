"""Sizes that change from call to call, compiled once with Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import compat, schedules
from megacompile.passes.stages import lower
from tests.zoo import assert_close, twins

pytestmark = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="no C++ compiler here")


class Small(nn.Module):
    """One stage, whose sizes are an expression, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.linear(x).view(x.shape[0] * 2, 4).relu() * scale
        return y.pow(2).mean()


def test_lengths_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    make = lower._compiled

    def noted(*given: Any) -> Any:
        compiled.append(given)
        return make(*given)

    monkeypatch.setattr(lower, "_compiled", noted)
    plain, streamed = twins(Small(), lowering="inductor", progress=False)
    counts = []
    for rows in (4, 6, 9, 33, 5):
        x = torch.arange(rows * 8.0).reshape(rows, 8).sin()
        losses = [model(x) for model in (plain, streamed)]
        for loss in losses:
            loss.backward()
        assert torch.allclose(*losses)
        counts.append(len(compiled))
    assert_close(plain, streamed)
    assert counts[1:] == [counts[1]] * 4
    assert [schedule.symbols is None for schedule in schedules(streamed)] == [True, False]
    counts = []
    for scale, rows in ((0.5, 7), (0.25, 7), (0.7, 9), (0.1, 6)):  # a float and a size
        x = torch.arange(8.0 * rows).reshape(rows, 8).sin()
        assert torch.allclose(plain(x, scale), streamed(x, scale))
        counts.append(len(compiled))
    assert counts[1:] == [counts[1]] * 3  # the first value is captured as it is
    symbols = schedules(streamed)[-1].symbols
    assert symbols is not None and len(symbols.planned) == 2
