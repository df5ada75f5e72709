"""The processes that save a model: one, or the ranks that share it, of which the first one writes.

every rank    gathers one tensor after the other, whole
the first     writes it; what goes wrong there is told to all, so that no rank waits for it
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from megacompile import compat
from megacompile.runtime.device.ranks import ranks_of


class Savers:
    """The ranks that save a model; all of them make one."""

    def __init__(self, model: nn.Module) -> None:
        sharded = next(filter(compat.is_sharded, model.parameters()), None)
        self._ranks = None if sharded is None else ranks_of(sharded)
        self._what = f"save() of {type(model).__name__}"

    @property
    def writes(self) -> bool:
        """True if this process writes."""
        return self._ranks is None or self._ranks.is_first

    def together(self) -> AbstractContextManager[None]:
        """Raises in all of them what raises in one."""
        return nullcontext() if self._ranks is None else self._ranks.together(self._what)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a tensor; of one that ranks share, a collective."""
        if not compat.is_sharded(tensor):
            return tensor
        assert self._ranks is not None, "who has such a tensor is one of several ranks"
        return self._ranks.all_of(tensor)
