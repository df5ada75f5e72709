"""Stochastic rounding where ranks share a model: who has other rows draws other numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from megacompile import megacompile

STEPS = 2
UNSETTLED = 1e-3  # from 1, where the neighbours in bfloat16 are 1 and 1 - 2**-8


def rounded(mesh: Any) -> torch.Tensor:
    """Rows that are equal before, all of them: each rank's after some steps, (ranks, ...).

    Those that shard have one seed, as most scripts set it; replicas have others, and must draw the
    same all the same.
    """
    torch.manual_seed(0 if mesh.ndim == 1 else dist.get_rank())
    model = nn.Linear(64, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    megacompile(model, mesh=mesh, device="cpu", lowering="eager", stochastic_rounding=True)
    optimizer = SGD(model.parameters(), lr=UNSETTLED)
    for _ in range(STEPS):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight: Any = model.weight
    mine = weight.to_local().detach().clone()
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found)
