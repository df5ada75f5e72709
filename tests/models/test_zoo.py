"""Models of other libraries, as they are: the same numbers as plain. docs/zoo.md has all of them.

`make zoo` compares every model; here is a part of them, of torch and transformers alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.draws import drawn
from tests.zoo.command import ENTRIES, INTRODUCTION, PAGE, faults, line, rows_of, tolerance
from tests.zoo.compare import compare, error
from tests.zoo.entry import Entry, Family

FAST = ("llama (eager)", "resnet", "nn.LSTM", "nn.EmbeddingBag")
OTHERS = ("mixtral (sdpa)", "t5", "bert (eager)", "vit (sdpa)", "nn.Transformer")


@pytest.mark.parametrize("name", drawn(FAST, OTHERS))
def test_same_numbers(name: str) -> None:
    entry = ENTRIES[name]
    if not entry.is_there:
        pytest.skip(f"{entry.needs} is not installed")
    result = compare(entry)
    assert faults(entry, result) == []


@pytest.mark.gpu
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("name", ENTRIES)
def test_same_numbers_on_the_gpu(name: str, lowering: str) -> None:
    entry = ENTRIES[name]
    if not entry.is_there:
        pytest.skip(f"{entry.needs} is not installed")
    result = compare(entry, device="cuda", lowering=lowering)
    assert result.error <= tolerance(entry, inductor=lowering == "inductor"), result.where


def test_the_page_is_what_the_command_writes() -> None:
    """And has a row of every model; what is in the rows, `make zoo` compares."""
    text = PAGE.read_text()
    rows = rows_of(text)
    assert text.startswith(INTRODUCTION)
    assert list(rows) == list(ENTRIES)
    assert all(line(row) in text.splitlines() for row in rows.values())


class Wrong(nn.Linear):
    """Computes something else where it is captured."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * (1 + 1e-6) if torch.compiler.is_compiling() else x


def test_a_difference_is_found() -> None:
    wrong = Entry("wrong", Family.TORCH, lambda: Wrong(4, 4), lambda: {"x": torch.ones(2, 4)})
    result = compare(wrong)
    assert 1e-7 < result.error < 1e-5
    assert "grad" in result.where or "output" in result.where
    assert (result.breaks, result.streamed) == (0, 1.0)
    one = torch.tensor([1.0])
    assert error(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0])) == 0.25
    assert error(one * torch.nan, one * torch.nan) == 0
    for other in (one * torch.nan, torch.ones(2), one.double()):
        assert error(one, other) == torch.inf
