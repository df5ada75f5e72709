"""DTensors of a rank: whoever uses one asks its guard first, and states in 8 bits stay packed."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megacompile import compat
from megacompile.runtime.optim.blockwise import BlockwiseTensor, quantize, to_plain
from megacompile.runtime.params.guards import guard, guard_dtensors, release
from tests.processes import group_of_one


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with group_of_one(datetime.timedelta(seconds=20)):
        compat.use_dtensor()
        yield init_device_mesh("cpu", (1,))


def shared(mesh: DeviceMesh, *shape: int) -> Any:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))


class Asked:
    """A guard that counts."""

    def __init__(self) -> None:
        self.count = 0

    def open(self, tensor: Tensor) -> None:
        self.count += 1
        release(tensor)

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented


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


def test_whoever_uses_a_guarded_dtensor_asks(mesh: DeviceMesh) -> None:
    guard_dtensors()
    for name, use in USES.items():
        param, asked = shared(mesh, 3, 2), Asked()
        assert guard(param, asked)
        assert param.shape == (3, 2) and asked.count == 0
        use(param)
        assert asked.count == 1 and type(param) is DTensor, name


def test_a_dtensor_over_a_subclass_keeps_it(mesh: DeviceMesh) -> None:
    """Of states in 8 bits: read, written and gathered by the names of DTensor."""
    param = shared(mesh, 70, 70)
    codes, absmax = quantize(torch.zeros(4900), True)
    view = BlockwiseTensor(compat.local(param), codes, absmax, signed=True, settle=lambda: None)
    state: Any = compat.like(param, view)
    assert compat.local(state) is view and state.shape == param.shape
    assert state.dtype == torch.float32
    with torch.no_grad():
        state.copy_(compat.like(param, torch.ones(70, 70)))
    assert absmax.eq(1).all() and state.full_tensor().eq(1).all()
    plain = to_plain({"state": [state]})["state"][0]
    assert type(plain) is DTensor and type(compat.local(plain)) is Tensor
