"""What a step holds: saved tensors on the device and the host, and host memory made ahead."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from megacompile import megacompile
from tests import inside, zoo
from tests.zoo import Stack, batch, loss_of, twins

OFFLOAD: dict[str, Any] = {"activations": "offload", "lookahead": 1}


def loss(model: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return loss_of(model(**batch(seed)))


def test_device_memory_at_the_turn_does_not_grow_with_depth() -> None:
    """Where stage inputs wait on the host; where they stay, it does."""
    left: dict[str, list[int]] = {"offload": [], "recompute": []}
    for choice, found in left.items():
        for layers in (4, 7):
            _, model = twins(Stack(layers=layers), activations=choice, lookahead=1)
            found.append(inside.left_for_backward(loss(model, 0)))
    assert left["offload"][0] == left["offload"][1] > 0
    assert left["recompute"][0] < left["recompute"][1]


def test_host_memory_is_reused_from_step_to_step() -> None:
    """No more is held than was ever in use at once; forwards that are lost and evaluations hold
    nothing."""
    plain, model = twins(Stack(layers=5), **OFFLOAD)
    pool, sizes = inside.machine(model).activations, set[int]()
    with torch.no_grad():
        loss(model, 0)
    assert pool.peak_bytes == 0, "an evaluation offloads nothing"
    for i in range(4):
        for each in (plain, model):
            loss(each, i).backward()
        lost = loss(model, i)
        del lost
        sizes.add(pool.held_bytes)
        assert sizes == {pool.peak_bytes} and pool.peak_bytes and pool.lent_bytes == 0
        zoo.assert_same(plain, model)


# --- host memory that is made ahead of its use


class Runtime:
    """Of CUDA, which is not there: every page is locked."""

    def cudaHostRegister(self, *args: int) -> int:
        return 0


def pinned(**options: Any) -> tuple[Any, Any]:
    """(a model whose buckets are as if a GPU copied from them, its optimizer)."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if options.pop("in_backward", False):
        options["optimizer"] = optimizer
    megacompile(model, device="cpu", progress=False, **options)
    for bucket in inside.machine(model).buckets.values():
        bucket.pin = True
    return model, optimizer


def held(model: Any) -> int:
    """Of host memory, when nothing is being made."""
    budget = inside.machine(model).host_budget
    budget.await_made()
    return budget.held_bytes


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"in_backward": True}, 8),
        ({"in_backward": True, "state_dtype": "int8"}, 2),
        ({"lowering": "inductor"}, 4 + 8),
    ],
    ids=str,
)
def test_the_first_step_finds_its_memory(options: Any, least: float) -> None:
    """Gradients and states are made during the first forward, to the byte: a step holds no more,
    and none of it is for nothing."""
    with mock.patch.object(torch.cuda, "cudart", Runtime):
        model, optimizer = pinned(**options)
        before = held(model)
        out = model(torch.randn(2, 64)).square().sum()
        ahead = held(model) - before
        out.backward()
        optimizer.step()
        assert held(model) - before == ahead
        numel = sum(param.numel() for param in model.parameters())
        assert numel * least <= ahead < 1.2 * numel * least and optimizer.state


def test_what_nobody_will_need_is_not_made_or_goes() -> None:
    """An evaluation makes nothing; states that an optimizer makes itself are not guessed; a second
    step gives back what was not asked for."""
    with mock.patch.object(torch.cuda, "cudart", Runtime):
        model, optimizer = pinned(lowering="eager")
        before = held(model)
        with torch.no_grad():
            model(torch.randn(2, 64))
        assert held(model) == before
        model(torch.randn(2, 64)).sum().backward()
        gradients = sum(param.nbytes for param in model.parameters())
        assert gradients <= held(model) - before < 1.2 * gradients
        optimizer.step()
        without = held(model)
        budget = inside.machine(model).host_budget
        budget.preallocate([inside.wanted(4096)], "states", torch.device("cpu"))
        assert held(model) == without + 4096
        other = SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            model(torch.randn(2, 64)).sum().backward()
            other.step()
        assert held(model) == without and not budget._ahead
