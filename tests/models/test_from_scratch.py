"""examples/from_scratch.py: the idea in one file, next to the plain model in every bit."""

from __future__ import annotations

import from_scratch
import pytest
import torch


def test_it_equals_the_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    from_scratch.main()  # which compares losses and parameters
    shown = capsys.readouterr().out
    assert "stages: 0 embed, 1 blocks.0, 2 blocks.1, 3 blocks.2, 4 blocks.3, 5 head" in shown
    assert shown.count("streamed") == 4


def test_gradients_of_a_value_with_several_readers_are_summed() -> None:
    class Skips(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            last = self.layers[2](self.layers[1](first) + first)
            total: torch.Tensor = (last + first).sum()
            return total

    torch.manual_seed(0)
    plain, model = Skips(), Skips()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    streamed = from_scratch.Streamed(model, x)
    assert len(streamed.stages) == 3
    plain(x).backward()
    streamed.step(x)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-6)
