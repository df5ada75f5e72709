"""What the states of ranks take, as plans count it and as the runtime gets it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from megacompile import megacompile
from megacompile.cost.memory import Kind, streamed_bytes
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.places import state_bytes, stored_bytes
from megacompile.runtime.device.disk_buffers import DiskBuffer
from tests import inside
from tests.interconnect import Interconnect, Mesh, simulated

NETS = {
    "8 bits, though a part is small": lambda: nn.Linear(64, 96, bias=False),
    "one part is smaller": lambda: nn.Linear(1500, 3, bias=False),
    "float32": lambda: nn.Linear(60, 60, bias=False),
}


@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("name", NETS)
def test_plans_count_the_states_that_a_rank_has(name: str, on_disk: bool, tmp_path: Path) -> None:
    """The whole parameter decides whether states are in 8 bits, of all parts of it."""
    ranks = Interconnect(2)

    def train(rank: int) -> tuple[int, int]:
        model: Any = NETS[name]()
        options: dict[str, Any] = {"disk": tmp_path} if on_disk else {}
        mesh: Any = Mesh(rank, ranks)
        megacompile(model, mesh=mesh, device="cpu", lowering="eager", state_dtype="int8", **options)
        optimizer = AdamW(model.parameters())
        model(torch.ones(2, model.in_features)).sum().backward()
        optimizer.step()
        streamed = inside.streamed(model)
        (bucket,) = streamed.machine.buckets.values()
        buffers: list[Any] = [each() for each in bucket.states._owned[optimizer].buffers]
        cost = OptimizerCost.of(streamed.options)
        each_state = state_bytes(bucket.whole, [0], cost)
        kinds = streamed_bytes(bucket.whole, [0], cost)
        assert kinds[Kind.STATES] == cost.states * sum(each_state)
        host = cost.states * sum(max(size, mmap.PAGESIZE) for size in each_state)  # buffers
        disk = stored_bytes(bucket.whole, [0], cost)
        assert all(isinstance(buffer, DiskBuffer) == on_disk for buffer in buffers)
        return sum(map(len, buffers)), disk if on_disk else host

    with simulated():
        found = ranks.run([lambda: train(0), lambda: train(1)], seed=0)
    took, counted = found[0]  # the first has the largest parts
    assert took == counted
