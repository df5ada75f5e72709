"""Models that fit, whose short stages run as one: they train as the plain model does."""

from __future__ import annotations

from collections.abc import Iterator
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


def batches(rows: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    for n in rows:
        yield (
            torch.randn(n, 3, 8, 8, generator=drawn),
            torch.randint(4, (n,), generator=drawn),
        )


def step(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss, _ = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found: Tensor = loss.detach()
    return found


def made() -> Vision:
    torch.manual_seed(0)
    return Vision()


def trained(**options: Any) -> tuple[list[Any], list[Any]]:
    """The plain model and the streamed one, and the values of both, after some steps, with a
    smaller batch and an evaluation in between."""
    models: list[Any] = [made(), megacompile(made(), device="cpu", progress=False, **options)]
    values: list[Any] = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found: list[Tensor] = []
        for k, batch in enumerate(batches([4, 4, 4, 3, 4, 4, 3, 4])):
            found.append(step(model, optimizer, batch))
            if k in (2, 5):
                model.eval()
                with torch.no_grad():
                    found.append(model(*batch)[1].sum())
                model.train()
        values.append([*found, *model.state_dict().values()])
    return models, values


@pytest.mark.parametrize("memory", ["1GiB", pytest.param(None, marks=pytest.mark.thorough)])
def test_a_model_that_fits_trains_as_the_plain_one(memory: str | None) -> None:
    (_, streamed), (plain, ours) = trained(gpu_memory=memory, lowering="inductor")
    for theirs, mine in zip(plain, ours, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    training = [s for s in schedules(streamed) if s.backward is not None]
    assert training and {len(s.stages) for s in training} == ({1} if memory else {5})
    if memory:
        assert "short stages run as one" in str(explain(streamed, changes=False))


def test_statistics_are_written_as_one_by_one() -> None:
    """In every bit, also where the graph is eager: their new values go in a few copies."""
    _, (plain, ours) = trained(lowering="eager", resident="all")
    for theirs, mine in zip(plain, ours, strict=True):
        assert torch.equal(mine, theirs)


def test_what_grew_too_large_runs_in_stages() -> None:
    model: Any = megacompile(
        made(), device="cpu", progress=False, gpu_memory="100MiB", lowering="inductor"
    )
    plain, counts = made(), []
    for n in (4, 6, 400):
        ((x, labels),) = batches([n])
        x = x.repeat(1, 1, 4, 4) if n == 400 else x
        losses = [each(x, labels)[0] for each in (plain, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        for param, mine in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, param.grad, rtol=1e-3, atol=1e-4)
        for each in (plain, model):
            each.zero_grad()
        counts.append(len(schedules(model)[-1].stages))
    assert counts == [1, 1, 5]
