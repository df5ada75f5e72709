"""Gradients that an update in the backward has taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.runtime.params.guards import guard, guard_of


class Consumed:
    """Guards a `p.grad` that is gone: the backward has made an update of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, tensor: torch.Tensor) -> None:
        del tensor
        raise OptimizerError(
            f"p.grad of {self.name!r} is not there: megacompile(model, optimizer=...) updates in "
            "the backward, and gradients never leave the device, so they cannot be read, clipped "
            "by their global norm or unscaled by a GradScaler; for those leave out optimizer=, or "
            "use megacompile.accumulate(model) around the backward, and clip micro-batches"
        )

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`zero_grad(set_to_none=False)` has nothing to do.

        Raises:
            OptimizerError: a GradScaler unscales it, too late.
        """
        del kwargs
        if function is compat.FOREACH_UNSCALE:
            raise OptimizerError(
                f"p.grad of {self.name!r} cannot be unscaled: megacompile(model, optimizer=...) "
                "has made the update in the backward. If the loss was scaled, parameters and "
                "optimizer states are wrong now: load a checkpoint of both. For a GradScaler leave "
                "out optimizer=; bfloat16 needs none"
            )
        if function in (torch.Tensor.zero_, torch.Tensor.detach_):
            return args[0]
        return None if function is compat.FOREACH_ZERO else NotImplemented


def consumed(gradient: torch.Tensor | None) -> bool:
    """Has an update in the backward taken it?"""
    return gradient is not None and isinstance(guard_of(gradient), Consumed)


def consume(param: nn.Parameter, name: str) -> None:
    """Let `p.grad` say that it is gone; it takes no memory."""
    dtype = param.grad_dtype or param.dtype
    gradient = torch.zeros((), dtype=dtype).expand(param.shape)
    guard(gradient, Consumed(name))
    param.grad = gradient
