"""Models that are made of torch's own modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import BATCH, LENGTH, VOCABULARY, Call, Entry, Family, Rounding, floats, ids

WIDTH = 32


class Recurrent(nn.Module):
    """An embedding, layers that keep a state, and a head, as for a language model."""

    def __init__(self, cell: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            cell(WIDTH, WIDTH, num_layers=1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) int64 -> the loss
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden, _ = layer(hidden)
        logits = self.head(hidden[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten())


class Bags(nn.Module):
    """Sums of embeddings, and layers on top, as in a recommender."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, WIDTH, mode=mode) for _ in range(3))
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        sums = [table(tokens, offsets) for table in self.tables]
        return self.top(torch.cat(sums, -1))


class Cells(nn.Module):
    """A cell that a loop in Python runs over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:  # (batch, length, width) -> (batch, 4)
        state = x.new_zeros(x.shape[0], WIDTH)
        for now in x.unbind(1):
            state = self.cell(now, state)
        return self.head(state)


def _encoder(norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _convolutions() -> nn.Module:
    blocks: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16), (16, 16)):
        block = (nn.Conv1d(before, after, 3, padding=1), nn.BatchNorm1d(after), nn.ReLU())
        blocks.append(nn.Sequential(*block, nn.Dropout(0.1)))
    return nn.Sequential(*blocks)


def entry(
    name: str, build: Callable[[], nn.Module], call: Callable[[], Call], **of_entry: Any
) -> Entry:
    return Entry(name, Family.TORCH, build, call, **of_entry)


def _sequence(name: str, *size: int) -> Callable[[], Call]:
    return lambda: {name: floats(*size)}


def _tokens() -> Call:
    return {"tokens": ids()}


NOT_CAPTURED = "Dynamo captures no nn.RNN, nn.GRU and nn.LSTM"

ENTRIES: list[Entry] = [
    entry(
        "nn.Transformer",
        lambda: nn.Transformer(WIDTH, 4, 2, 2, 48, batch_first=True),
        lambda: {"src": floats(BATCH, LENGTH, WIDTH), "tgt": floats(BATCH, 6, WIDTH, seed=3)},
        rounding=Rounding(1e-6, "in eval, the plain model takes torch's fused layer instead"),
    ),
    entry("nn.TransformerEncoder", _encoder, _sequence("src", BATCH, LENGTH, WIDTH)),
    entry(
        "nn.TransformerEncoder, norm first",
        functools.partial(_encoder, norm_first=True),
        _sequence("src", BATCH, LENGTH, WIDTH),
    ),
    entry("nn.LSTM", lambda: Recurrent(nn.LSTM), _tokens, note=NOT_CAPTURED),
    entry("nn.GRU", lambda: Recurrent(nn.GRU), _tokens, note=NOT_CAPTURED),
    entry("nn.RNN", lambda: Recurrent(nn.RNN), _tokens, note=NOT_CAPTURED),
    entry("nn.GRUCell", Cells, _sequence("x", BATCH, LENGTH, WIDTH)),
    entry(
        "nn.EmbeddingBag",
        lambda: Bags("sum"),
        lambda: {"tokens": ids(12), "offsets": torch.tensor([0, 5])},
    ),
    entry("nn.Conv1d", _convolutions, _sequence("input", BATCH, 1, 16)),
]
