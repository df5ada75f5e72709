"""Models that fit, whose short stages run as one: they train as the plain model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import explain, megacompile, schedules
from tests import inside

pytestmark = pytest.mark.skipif(
    not inside.has_cpp_compiler(), reason="Inductor needs a C++ compiler"
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Vision(nn.Module):
    """Convolutions, and statistics of three dtypes' worth of buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return F.cross_entropy(logits, labels), logits


def made() -> Vision:
    torch.manual_seed(0)
    return Vision()


def compare(sizes: list[int], *, close: Any, **options: Any) -> list[int]:
    """Losses, statistics and parameters of steps of so many rows, with an evaluation in between,
    are those of the plain model; gives the numbers of stages. 400 rows are of larger images."""
    models: list[Any] = [made(), megacompile(made(), device="cpu", progress=False, **options)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    generator, counts = torch.Generator().manual_seed(1), []
    for k, n in enumerate(sizes):
        x = torch.randn(n, 3, 8, 8, generator=generator).repeat(1, 1, *[4 if n == 400 else 1] * 2)
        labels = torch.randint(4, (n,), generator=generator)
        losses: list[Tensor] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss, _ = model(x, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        close(*losses)
        counts.append(len(schedules(models[1])[-1].stages))
        if k == 2 and n != 400:
            for model in models:
                model.eval()
                with torch.no_grad():
                    losses.append(model(x, labels)[1])
                model.train()
            close(*losses[2:])
    for mine, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        close(mine, theirs)
    if options.get("gpu_memory") and 400 not in sizes:
        assert "short stages run as one" in str(explain(models[1], changes=False))
    return counts


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("memory", ["1GiB", None])
def test_a_model_that_fits_trains_as_the_plain_one(memory: str | None) -> None:
    sizes = [4, 4, 4, 3, 4, 4, 3, 4]
    counts = compare(sizes, close=close, gpu_memory=memory, lowering="inductor")
    assert set(counts) == ({1} if memory else {5})


def test_what_grew_too_large_runs_in_stages() -> None:
    counts = compare([4, 6, 400], close=close, gpu_memory="100MiB", lowering="inductor")
    assert counts == [1, 1, 5]


def test_statistics_are_written_as_one_by_one() -> None:
    """In every bit, also where the graph is eager: their new values go in a few copies."""

    def same(a: Tensor, b: Tensor) -> None:
        assert torch.equal(a, b)

    compare([4, 4, 4, 3, 4], close=same, lowering="eager", resident="all")
