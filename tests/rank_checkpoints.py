"""Checkpoints of a model that ranks share: saved by some ranks, loaded by others, trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.rank_loops import Loop

STEPS = 2
dcp: Any = checkpoint  # which does not name what it exports
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Rows(nn.Module):
    """Some parameters have states in 8 bits where these are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 71)
        self.layers = nn.ModuleList(nn.Linear(71, 71) for _ in range(2))
        self.last = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        loss: Tensor = (hidden * self.last - 1.0).square().mean()
        return loss


def steps(loop: Loop, first: int) -> None:
    """Some steps of training."""
    for step in range(first, first + STEPS):
        loop.train(step)
        loop.update()


def save(mesh: Any, ranks: int, folder: Path, **options: Any) -> dict[str, Any]:
    """Train, save everything in every way, and train on."""
    loop = Loop(Rows, mesh, ranks, **options)
    steps(loop, 0)
    state: dict[str, Any] = {
        "model": get_model_state_dict(loop.model),
        "optimizer": get_optimizer_state_dict(loop.model, loop.optimizer),
    }
    dcp.save(state, checkpoint_id=folder / "dcp")
    full = full_state(loop)
    loop.seen.clear()
    there = loop.record()
    if dist.get_rank() == 0:
        torch.save(full, folder / "full")
    dist.barrier()
    steps(loop, STEPS)
    return {"saved": there, "trained": loop.record()}


def full_state(loop: Loop) -> dict[str, Any]:
    """All of it, in rank 0."""
    return {
        "model": get_model_state_dict(loop.model, options=FULL),
        "optimizer": get_optimizer_state_dict(loop.model, loop.optimizer, options=FULL),
    }


def load(mesh: Any, ranks: int, folder: Path, **options: Any) -> dict[str, Any]:
    """Load what `save` has saved, and train on."""
    loop = another(mesh, ranks, **options)
    state: dict[str, Any] = {
        "model": get_model_state_dict(loop.model),
        "optimizer": get_optimizer_state_dict(loop.model, loop.optimizer),
    }
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=mesh is None)
    set_model_state_dict(loop.model, state["model"])
    set_optimizer_state_dict(loop.model, loop.optimizer, state["optimizer"])
    return _trained_on(loop)


def load_full(mesh: Any, ranks: int, folder: Path, **options: Any) -> dict[str, Any]:
    """The same of what `get_model_state_dict` and its like gathered."""
    loop = another(mesh, ranks, **options)
    full = torch.load(folder / "full")
    set_model_state_dict(loop.model, full["model"], options=FULL)
    set_optimizer_state_dict(loop.model, loop.optimizer, full["optimizer"], options=FULL)
    return _trained_on(loop)


def load_plainly(mesh: Any, ranks: int, folder: Path, **options: Any) -> dict[str, Any]:
    """`load_state_dict` of this rank's own state dicts, of a run that has gone as far."""
    loop = Loop(Rows, mesh, ranks, **options)
    steps(loop, 0)
    model, optimizer = loop.model.state_dict(), loop.optimizer.state_dict()
    torch.save(optimizer, folder / f"optimizer{dist.get_rank()}")
    fresh = another(mesh, ranks, **options)
    fresh.model.load_state_dict(model)
    kept = torch.load(folder / f"optimizer{dist.get_rank()}", weights_only=False)
    fresh.optimizer.load_state_dict(kept)
    return _trained_on(fresh)


def another(mesh: Any, ranks: int, **options: Any) -> Loop:
    """A model of other values."""
    loop = Loop(Rows, mesh, ranks, **options)
    with torch.no_grad():
        for param in loop.model.parameters():
            param.add_(1.0)
    return loop


def _trained_on(loop: Loop) -> dict[str, Any]:
    loop.seen.clear()
    there = loop.record()
    steps(loop, STEPS)
    return {"loaded": there, "trained": loop.record()}
