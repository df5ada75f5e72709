"""Ranks that share a model with float8 layers: `torchrun ... -m tests.float8_ranks FOLDER`.

Each rank saves, by recipe and by how it updates, the losses that it had, and in the end the whole
gradients and parameters.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
    precompute_float8_dynamic_scale_for_fsdp,
)

from megacompile import accumulate, megacompile
from tests.models.test_float8 import IDS, RECIPES, adamw, decoder
from tests.ranks.here import whole

WORLD = 2
WAYS = ("exact", "in the backward")


def batches(rank: int) -> list[Tensor]:
    return list(IDS[rank::WORLD])


def trained(model: nn.Module, way: str, rank: int, mesh: Any) -> dict[str, Any]:
    optimizer = adamw(model)
    given: dict[str, Any] = {"optimizer": optimizer} if way != "exact" else {}
    megacompile(model, mesh=mesh, device="cpu", lowering="eager", **given)
    first, last = batches(rank)
    with accumulate(model) if given else nullcontext():
        losses = [backward(model, first)]
    losses.append(backward(model, last))
    grads = {} if given else found(model, grads=True)
    optimizer.step()
    precompute_float8_dynamic_scale_for_fsdp(model)  # changes nothing
    return {"losses": losses, "grads": grads, "params": found(model)}


def found(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    params: dict[str, Any] = dict(model.named_parameters())
    return {name: whole(param.grad if grads else param) for name, param in params.items()}


def backward(model: nn.Module, ids: Tensor) -> Tensor:
    loss = model(ids)
    loss.backward()
    return loss.detach().clone()


def alone(recipe: str) -> dict[str, Any]:
    """The same in one process, which has the micro-batches of all ranks. As ranks do, it adds the
    means of what they have at once, in the parameters' dtype."""
    model = decoder(recipe, emulate=True)
    losses: list[list[Tensor]] = [[] for _ in range(WORLD)]
    sums = [torch.zeros_like(param) for param in model.parameters()]
    for several in zip(*(batches(rank) for rank in range(WORLD)), strict=True):
        grads = []
        for rank, ids in enumerate(several):
            model.zero_grad()
            losses[rank].append(backward(model, ids))
            grads.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
        for total, first, second in zip(sums, *grads, strict=True):
            total += (first + second) / WORLD
    for param, total in zip(model.parameters(), sums, strict=True):
        param.grad = total
    grads_of_all = found(model, grads=True)
    adamw(model).step()
    return {"losses": losses, "grads": grads_of_all, "params": found(model)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (WORLD,))
    results = {
        (recipe, way): trained(decoder(recipe, emulate=True), way, rank, mesh)
        for recipe in RECIPES
        for way in WAYS
    }
    torch.save(results, folder / str(rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
