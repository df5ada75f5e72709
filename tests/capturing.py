"""Graphs that Dynamo captures of modules on the CPU, without a runtime, and modules for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacompile.ir.schedule import Schedule
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs


class Layer(nn.Module):
    """A saved value layer."""

    def __init__(self, width: int = 4, *, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = scale
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:  # (..., width) -> (..., width)
        hidden = F.dropout(F.gelu(self.up(x)), self.dropout)
        return x + self.scale * self.down(hidden)


class Net(nn.Module):
    """`embed`, `layers` and `head`, called as `function(net, *inputs)`."""

    def __init__(self, function: Callable[..., Any], *, depth: int = 3, **layer: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer(**layer) for _ in range(depth))
        self.head = nn.Linear(4, 4)
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)

    def chain(self, x: Tensor) -> Tensor:
        """One after the other, and a scalar loss."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()

    def checkpointed(self, x: Tensor) -> Tensor:
        """The same, with an activation checkpoint around each layer."""
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).square().mean()


class Counting(nn.Module):
    """A layer with a buffer that it changes and whose old value its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.get_buffer("scale")
        out: Tensor = self.fc(x) * scale.clone()
        scale.add_(1)
        return out.tanh()


def capture(model: nn.Module, *args: Any, **kwargs: Any) -> AbstractProgram:
    """The first graph that Dynamo captures of `model(*args, **kwargs)`; nothing is computed."""
    options = abstract_options(device="cpu", lowering="eager")
    return abstract_programs(model, args, kwargs, options=options)[0]


def differentiated(captured: AbstractProgram) -> Schedule:
    """Its forward and backward."""
    return captured.compiler.pipeline.differentiated(*captured.planned())
