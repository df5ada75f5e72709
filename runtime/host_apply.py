"""`model.to(device)` of a streamed model: its parameters stay where they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class HostApply:
    """Replaces a model's `_apply`: `model.to(device)` leaves the parameters where they are.

    Dtype changes are applied. It pickles and copies as the plain method, so a copied or loaded
    model is a plain one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.said = False

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, "_apply")

    def __call__(self, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        params = {id(p) for p in self.model.parameters()}
        moved = False

        def stay(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal moved
            probe = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if id(tensor) not in params or probe.device == tensor.device:
                result: torch.Tensor = function(tensor)
                return result
            moved = True
            return tensor.to(probe.dtype)

        applied: nn.Module = type(self.model)._apply(self.model, stay, recurse)
        if moved and not self.said:
            self.said = True
            warnings.warn(
                "megacompile: parameters stay in host memory and are streamed to the device; "
                "model.to(device) moved only buffers (said once)",
                stacklevel=3,
            )
        return applied
