"""DTensors of a rank: whoever uses one waits for the update in flight first."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW

from megacompile import megacompile
from tests.processes import group_of_one
from tests.stateful.late import late

USES: dict[str, Callable[[Any], Any]] = {
    "full_tensor": lambda p: p.full_tensor(),
    "to_local": lambda p: p.to_local(),
    "an operator": lambda p: p + 1,
    "redistribute": lambda p: p.redistribute(placements=[Replicate()]),
    "_local_tensor": lambda p: p._local_tensor,
    "a function": lambda p: torch.linalg.vector_norm(p),
    "detach": lambda p: p.detach(),
    "untyped_storage": lambda p: p.untyped_storage(),
}


def test_whoever_uses_a_guarded_dtensor_waits() -> None:
    with group_of_one(datetime.timedelta(seconds=20)):
        mesh = init_device_mesh("cpu", (1,))
        model = megacompile(nn.Sequential(nn.Linear(4, 3)), mesh=mesh, device="cpu")
        optimizer = AdamW(model.parameters(), lr=0.1)
        for _ in range(2):  # the first step makes the states
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        workers, param = late(model), cast(Any, model)[0].weight
        for name, use in USES.items():
            model(torch.ones(2, 4)).sum().backward()
            workers.finish()
            workers.waited.clear()
            optimizer.step()
            assert param.shape == (3, 4) and not workers.waited
            use(param)
            assert len(workers.waited) == 1 and type(param) is DTensor, name
        workers.finish()
