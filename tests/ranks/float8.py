"""Ranks that share a model with float8 layers, next to one process with the rows of all.

A scale of the whole weight is not that of a rank's rows: a loss has its every bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
    precompute_float8_dynamic_scale_for_fsdp,
)

from megacompile import accumulate, megacompile
from tests.models.test_float8 import IDS, RECIPES, adamw, decoder
from tests.ranks.here import Check, Here, differing, whole

WORLD = 2


def batches(rank: int) -> list[Tensor]:
    return list(IDS[rank::WORLD])


def trained(model: nn.Module, here: Here, *, in_backward: bool) -> dict[str, Any]:
    optimizer = adamw(model)
    given: dict[str, Any] = {"optimizer": optimizer} if in_backward else {}
    megacompile(model, mesh=here.mesh, device="cpu", lowering="eager", **given)
    first, last = batches(here.rank)
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


def scales_by_whole_weights(recipe: str) -> Check:

    def as_alone(here: Here) -> None:
        expected = alone(recipe)
        exact, updated = (
            trained(decoder(recipe, emulate=True), here, in_backward=way) for way in (False, True)
        )
        for losses in (exact["losses"], updated["losses"]):
            assert all(map(torch.equal, losses, expected["losses"][here.rank]))
        for kind in ("grads", "params"):
            assert not differing(exact[kind], expected[kind]), kind
        torch.testing.assert_close(updated["params"], expected["params"], rtol=1e-2, atol=1e-3)

    return as_alone


TWO: dict[str, Check] = {recipe: scales_by_whole_weights(recipe) for recipe in RECIPES}
