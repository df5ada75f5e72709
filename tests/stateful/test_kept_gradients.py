"""Gradients of buckets that live on the device, in plans: they take memory from the backward on,
and until `zero_grad()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megacompile import schedules
from megacompile.cost.memory import MemoryKind, device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.ir import ops
from tests import inside
from tests.zoo import assert_same, twins


class Wide(nn.Module):
    """Matrices alone: nobody else has the memory of their gradients."""

    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def live(model: Any, **how: Any) -> list[int]:
    """Bytes of gradients, moment after moment of the schedule."""
    cost = OptimizerCost.of(inside.streamed(model).options)
    (schedule,) = schedules(model)
    found = device_memory(schedule, optimizer=cost, fused=False, **how)
    return [moment.live_bytes[MemoryKind.GRADIENTS] for moment in found.moments]


def test_the_memory_model_has_them_from_the_backward_on() -> None:
    x = torch.ones(4, 16)
    _, model = twins(Wide(), resident="all")
    model(x).backward()
    (schedule,) = schedules(model)
    assert schedule.backward is not None
    assert len(ops.nodes_of(schedule.backward, ops.keep_grad)) == 3
    size = sum(p.grad.nbytes for p in model.parameters())
    found = live(model)
    assert found[0] == 0 and found[-1] == size
    assert min(live(model, gradients_stay=True)) == size
    model(x).backward()  # adds: another schedule
    assert min(live(model)) == size


def test_a_forward_that_finds_them_has_a_plan_that_counts_them() -> None:
    """Fewer buckets live on the device then, where it takes the memory."""
    x = torch.ones(64, 64)
    _, probe = twins(Wide(6, 64), resident="all", activations="keep")
    probe(x).backward()
    (schedule,) = schedules(probe)
    cost = OptimizerCost.of(inside.streamed(probe).options)
    least, most = (
        device_memory(schedule, optimizer=cost, fused=False, gradients_stay=stay).peak.total_bytes
        for stay in (False, True)
    )
    assert least < most
    budget = (3 * least + most) // 4
    plain, model = twins(Wide(6, 64), gpu_memory=budget)
    plain(x).backward()
    plain(x).backward()
    model(x).backward()
    before = inside.residents(model)
    assert len(before) == 6
    model.zero_grad()
    model(x).backward()
    with torch.no_grad():
        model(x)
    model.zero_grad()
    model(x).backward()
    assert inside.residents(model) == before, "a loop without micro-batches stays as it is"
    model(x).backward()
    assert inside.residents(model) < before
    (now,) = schedules(model)
    assert device_memory(now, optimizer=cost, fused=False).peak.total_bytes <= budget
    assert_same(plain, model)
