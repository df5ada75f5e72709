"""The interface of a system that is measured, and code that several of them share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.work import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY


class RefusedError(Exception):
    """A system cannot do this work; the message says why."""


def _nothing() -> None:
    return None


def _no_notes() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class System:
    """A model in training."""

    step: Callable[[Tensor], Tensor]  # (batch, length) ids -> () loss; one optimizer step
    finish: Callable[[], None] = _nothing  # waits for what runs in the background
    warmed: Callable[[], None] = _nothing  # is called once, behind the second step
    notes: Callable[[], dict[str, Any]] = _no_notes  # more about it, behind the last step


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """The optimizer of every system that takes one of torch's."""
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True, **options
    )


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, clips: bool = True
) -> Callable[[Tensor], Tensor]:
    """A user's training step; its loss stays on the device."""

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def layers(model: nn.Module) -> Any:
    """The decoder layers of a `Loss`."""
    inner: Any = model
    return inner.model.model.layers


def recompute_layers(model: nn.Module) -> None:
    """Recompute each decoder layer of a `Loss` in the backward."""
    inner: Any = model
    inner.model.gradient_checkpointing_enable({"use_reentrant": False})


def buffers_to(model: nn.Module, device: str) -> None:
    """Offloading is for parameters; buffers are where the layers compute."""
    for name, buffer in list(model.named_buffers()):
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, buffer.to(device))


def module(name: str) -> Any:
    """A package that ships no types, or may not be there."""
    return importlib.import_module(name)
