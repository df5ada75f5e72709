"""Small models: a function of the inputs, and the modules and tensors that it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Applies(nn.Module):
    """Modules, parameters and buffers by name; the function is given the model, too."""

    def __init__(self, function: Callable[..., Any], **named: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in named.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.function(self, *args, **named)


def in_a_row(function: Callable[..., Any], *, count: int = 2, width: int = 4, **named: Any) -> Any:
    """Linear layers of one width, called `first`, `last` and, where there are three, `middle`; the
    same each time."""
    torch.manual_seed(0)
    names = ("first", "last", "middle")[:count]
    layers = {name: nn.Linear(width, width) for name in names}
    return Applies(function, **layers, **named)
