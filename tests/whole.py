"""Layers whose product is an `autograd.Function` that Dynamo leaves whole, and that are configured
by objects of their own, as torchao's float8 layers are."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rounding(enum.Enum):
    HALVES = 2
    QUARTERS = 4


class Kernel(NamedTuple):
    emulate: bool = True


@dataclass(frozen=True)
class Config:
    rounding: Rounding = Rounding.QUARTERS
    dtype: torch.dtype = torch.float32


@torch._dynamo.allow_in_graph
class Product(torch.autograd.Function):
    """`x @ weight`, with both rounded to fractions, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernel: Kernel, config: Config) -> Tensor:
        assert kernel.emulate
        ctx.save_for_backward(x, weight)
        ctx.config = config
        return _rounded(x, config) @ _rounded(weight, config)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = _rounded(gradient, ctx.config)
        of_x = gradient @ _rounded(weight, ctx.config).t()
        return of_x, _rounded(x, ctx.config).t() @ gradient, None, None


def _rounded(x: Tensor, config: Config) -> Tensor:
    return (x * config.rounding.value).round().to(config.dtype) / config.rounding.value


class Whole(nn.Linear):
    """A layer of that product. What is not given is an object of its own."""

    def __init__(self, width: int = 4, config: Config | None = None) -> None:
        super().__init__(width, width, bias=False)
        self.kernel = Kernel()
        self.config = Config() if config is None else config

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Product.apply(x, self.weight.t(), self.kernel, self.config)  # type: ignore[no-untyped-call]
        return x + product


class Model(nn.Module):
    """A first layer, some of these, and a head with the loss."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Whole() for _ in range(layers))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()
