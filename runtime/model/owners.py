"""The owner of a parameter: the one megacompiled model whose buckets hold it."""

from __future__ import annotations

import gc
from typing import Protocol

from torch import nn

from megacompile.errors import ModelError
from megacompile.runtime.device.background import WeakIdSet


class Owner(Protocol):
    """A megacompiled model that owns parameters."""

    model: nn.Module

    def owns(self, param: nn.Parameter) -> bool:
        """True if a parameter is in a bucket of this model."""

    def let_go(self) -> None:
        """Release parameters that were removed from the model since its last call."""


def refuse_shared(model: nn.Module) -> None:
    """Raise if another megacompiled model owns a parameter of this model.

    Two owners would keep it in two buckets, and each would update it in `optimizer.step()`.

    Raises:
        ModelError: with the parameter's name in both models.
    """
    if _owners(model):
        gc.collect()  # collects unreferenced models
    for owner, name, param in _owners(model):
        names = [n for n, p in owner.model.named_parameters() if p is param]
        if not names:
            if owner.owns(param):  # the other model has released it
                owner.let_go()
            continue
        raise ModelError(
            f"megacompile(): parameter {type(model).__name__}.{name} is owned by another "
            f"megacompiled model ({type(owner.model).__name__}.{names[0]} there), and a parameter "
            "has one owner; megacompile one module that has both and calls them, give one of them "
            "a copy of the parameter, or call megacompile.unmegacompile() on the other model"
        )


def _owners(model: nn.Module) -> list[tuple[Owner, str, nn.Parameter]]:
    """Other megacompiled models with parameters of this one."""
    return [
        (other, name, param)
        for other in _LIVE
        if other.model is not model
        for name, param in model.named_parameters()
        if other.owns(param)
    ]


def register(owner: Owner) -> None:
    """Register an owner, by weak reference."""
    _LIVE.add(owner)


def live() -> tuple[Owner, ...]:
    """The owners that are alive."""
    return tuple(_LIVE)


def forget(owner: Owner) -> None:
    """Unregister an owner."""
    _LIVE.discard(owner)


_LIVE: WeakIdSet[Owner] = WeakIdSet()
