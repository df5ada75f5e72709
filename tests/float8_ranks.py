"""Ranks that share a model with float8 layers: `torchrun ... -m tests.float8_ranks FOLDER`.

Each rank saves, by recipe and by how it updates, the losses that it had, and in the end the whole
gradients and parameters.
"""

from __future__ import annotations

import sys
import warnings
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

WORLD = 2
WAYS = ("exact", "in the backward")


def batches(rank: int) -> list[Tensor]:
    """A rank's rows."""
    return list(IDS[rank::WORLD])


def trained(model: nn.Module, way: str, rank: int, mesh: Any) -> dict[str, Any]:
    """One step of two micro-batches each."""
    optimizer = adamw(model)
    given: dict[str, Any] = {"optimizer": optimizer} if way != "exact" else {}
    megacompile(model, mesh=mesh, device="cpu", lowering="eager", **given)
    losses = []
    first, last = batches(rank)
    if given:
        with accumulate(model):
            losses.append(backward(model, first))
    else:
        losses.append(backward(model, first))
    losses.append(backward(model, last))
    grads = {} if given else {n: whole(p.grad) for n, p in model.named_parameters()}
    optimizer.step()
    precompute_float8_dynamic_scale_for_fsdp(model)  # changes nothing
    return {"losses": losses, "grads": grads, "params": params(model)}


def backward(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a micro-batch."""
    loss = model(ids)
    loss.backward()
    found: Tensor = loss.detach().clone()
    return found


def params(model: nn.Module) -> dict[str, Tensor]:
    """All of them, whole."""
    return {name: whole(param) for name, param in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which this rank may have a part."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


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
            grads.append([whole(param.grad) for param in model.parameters()])
        for total, first, second in zip(sums, *grads, strict=True):
            total += (first + second) / WORLD
    for param, total in zip(model.parameters(), sums, strict=True):
        param.grad = total
    named = {name: whole(param.grad) for name, param in model.named_parameters()}
    adamw(model).step()
    return {"losses": losses, "grads": named, "params": params(model)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (WORLD,))
    found = {
        (recipe, way): trained(decoder(recipe, emulate=True), way, rank, mesh)
        for recipe in RECIPES
        for way in WAYS
    }
    torch.save(found, folder / str(rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
