"""Small models for tests of several ranks: each gives its loss, and makes its batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS = 11
WIDTH = 8


class Words(nn.Module):
    """A language model whose parameters have rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH), nn.LayerNorm(WIDTH)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, WORDS, (2, 5), generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits = self.head(hidden).flatten(0, 1)
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        return functional.cross_entropy(logits, x.flatten())


class Tied(Words):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Frozen(Words):
    """Of some layers nothing is trained, of others only the biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        self.get_parameter("layers.1.0.weight").requires_grad_(False)


class Adapted(Words):
    """Frozen, with adapters of low rank, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for i, layer in enumerate(self.layers):
            self.layers[i] = nn.Sequential(layer, Adapter(WIDTH))


class Adapter(nn.Module):
    """Adds a product of two thin matrices; one of them has fewer rows than there are ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, 3, bias=False)
        self.up = nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(self.down(x))
        return x + up


class Odd(nn.Module):
    """Parameters of one row, of none, of more dimensions; a gradient that some never get."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(3, 5, WIDTH))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.unused = nn.Parameter(torch.ones(5))

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(4, WIDTH, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        mixed = torch.einsum("bw,rcw->brc", x, self.mix) + self.none.sum()
        return mixed.square().mean()


class Convolutions(nn.Module):
    """Convolutions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        for layer in self.layers:
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(2, 3, 6, 6, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - 0.3).square().mean()


class Wide(nn.Module):
    """Parameters that are large enough for states in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(71, 71) for _ in range(3))

    def batch(self, generator: torch.Generator) -> Tensor:
        return torch.randn(8, 71, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - 1.0).square().mean()
