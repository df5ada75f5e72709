"""Stages that run in tiles, whose saved tensors wait on the host or on a disk: the same bits."""

from __future__ import annotations

import functools
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megacompile import megacompile, schedules
from megacompile.ir import ops
from tests import cases, test_tile
from tests.disks import few_buffers, harsh

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]
TILES = 5


def trained(name: str, *, in_backward: bool = False, **options: Any) -> tuple[Any, list[Any]]:
    """A model in tiles, with what its losses, gradients and parameters were."""
    case = cases.build(name)
    params = [p for p in case.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01)
    if in_backward:
        options["optimizer"] = optimizer
    model = megacompile(
        case.model, device="cpu", lowering="eager", tiles=TILES, progress=False, **options
    )
    seen = []
    for i in range(2):
        torch.manual_seed(i)
        loss = case.loss(model, i, torch.device("cpu"))
        loss.backward()
        seen.append(loss.detach())
        if not in_backward:
            seen += [p.grad.clone() for p in params if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return model, [*seen, *(p.detach().clone() for p in model.parameters())]


@functools.cache
def kept(name: str, in_backward: bool) -> list[Any]:
    """Where what is saved stays on the device."""
    return trained(name, in_backward=in_backward, activations="keep")[1]


def check(name: str, in_backward: bool, **options: Any) -> Any:
    model, mine = trained(name, in_backward=in_backward, activations="offload", **options)
    assert test_tile.in_tiles(model), "some piece runs in tiles"
    wanted = kept(name, in_backward)
    assert len(mine) == len(wanted)
    for k, (a, b) in enumerate(zip(mine, wanted, strict=True)):
        assert torch.equal(a, b), k
    return model


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["demo gpt", "dropout"])
def test_on_a_disk(tmp_path: Path, name: str, in_backward: bool) -> None:
    rng = random.Random(0)
    with ExitStack() as stack:
        stack.enter_context(harsh(rng))
        stack.enter_context(few_buffers(rng))
        model = check(name, in_backward, disk=tmp_path, disk_saved=True)
    written = [node for s in schedules(model) for node in ops.nodes_of(s.forward, ops.write_saved)]
    assert written


@pytest.mark.parametrize("in_backward", [False, True])
def test_on_the_host(in_backward: bool) -> None:
    model = check("demo gpt", in_backward)
    assert any(ops.nodes_of(s.forward, ops.offload_saved) for s in schedules(model))
