"""What compat takes for granted of DTensors, in a group of this process alone."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megacompile import compat
from tests.processes import group_of_one


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with group_of_one(datetime.timedelta(seconds=20)):
        compat.use_dtensor()
        yield init_device_mesh("cpu", (1,))


def shared(mesh: DeviceMesh, *shape: int) -> Any:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))


def test_the_part_is_the_very_tensor(mesh: DeviceMesh) -> None:
    """And can be exchanged."""
    param = shared(mesh, 3, 2)
    part = compat.local(param)
    assert type(part) is torch.Tensor and part is param._local_tensor
    assert compat.is_sharded(param) and not compat.is_sharded(part)
    assert compat.local(part) is part and compat.local(None) is None
    assert all(a is b for a, b in zip(compat.locals_of([param, part]), [part] * 2, strict=True))
    part.add_(1)
    assert param.full_tensor()[0, 0] == 1
    mine = torch.full((3, 2), 7.0)
    compat.set_local(param, mine)
    assert compat.local(param) is mine
    with torch.no_grad():
        param.mul_(2)
    assert mine.eq(14).all() and param.to_local().data_ptr() == mine.data_ptr()


def test_data_of_a_dtensor_cannot_be_replaced(mesh: DeviceMesh) -> None:
    """docs/limits.md says so."""
    param = shared(mesh, 3, 2)
    param.data = param.data * 2
    assert param.full_tensor()[0, 1] == 1


def test_a_tensor_like_another(mesh: DeviceMesh) -> None:
    param = shared(mesh, 3, 2)
    part = torch.ones(3, 2, dtype=torch.bfloat16)
    made: Any = compat.like(param, part)
    assert isinstance(made, DTensor) and made.placements == (Shard(0),)
    assert made.shape == param.shape and made.dtype == torch.bfloat16
    assert compat.local(made) is part and compat.storage_users(part) == 1
    assert compat.like(part, param) is param


def test_a_shared_parameter(mesh: DeviceMesh) -> None:
    part = torch.ones(3, 2)
    made: Any = compat.sharded_parameter(
        part, mesh, [Shard(0)], torch.Size((3, 2)), requires_grad=True
    )
    assert isinstance(made, nn.Parameter) and isinstance(made, DTensor) and made.is_leaf
    assert compat.local(made).data_ptr() == part.data_ptr() and made.stride() == (2, 1)


def test_values_of_all_ranks(mesh: DeviceMesh) -> None:
    param = shared(mesh, 3, 2)
    assert compat.mesh_of(param) is mesh
    value = torch.randn(3, 2)
    assert compat.local(compat.distributed(value, param)).equal(value)
    assert compat.whole(param, value).equal(value)
    mean: Any = compat.averaged(value, param)
    assert mean.placements == (Shard(0),) and compat.local(mean).equal(value)


def test_collectives_have_the_arguments_that_are_used(mesh: DeviceMesh) -> None:
    out, given = torch.zeros(4), torch.ones(4)
    compat.ALL_GATHER(out, given, group=mesh.get_group(0))
    assert out.equal(given)
    compat.REDUCE_SCATTER(out.zero_(), given, op=dist.ReduceOp.SUM, group=mesh.get_group(0))
    assert out.equal(given)
    with compat.coalesced(mesh.get_group(0), torch.device("cpu")):
        compat.ALL_GATHER(out, given, group=mesh.get_group(0))


def test_where_autograd_ends(mesh: DeviceMesh) -> None:
    for shape in ((3, 2), (0, 2)):  # a view of no rows cannot be divided
        param = shared(mesh, *shape)
        node = compat.accumulator_of(param)
        assert "AccumulateGrad" in type(node).__name__
        (param * 2).sum().backward()
        assert compat.accumulator_of(param) is node


def test_a_part_behind_the_beginning_of_its_memory_is_copied(mesh: DeviceMesh) -> None:
    """As in a bucket. Torch's own deepcopy fails there."""
    param = shared(mesh, 3, 2)
    compat.set_local(param, torch.arange(8.0)[2:].view(3, 2))
    state = param.detach()
    assert state.storage_offset() == 2
    for source in (param, state):
        first, again = copy.deepcopy([source, source])
        assert first is again and type(first) is DTensor
        assert isinstance(first, nn.Parameter) == isinstance(source, nn.Parameter)
        assert first.requires_grad == source.requires_grad
        assert compat.local(first).data_ptr() != compat.local(source).data_ptr()
        assert first.full_tensor().equal(torch.arange(2.0, 8.0).view(3, 2))
    assert compat.use_dtensor() is DTensor
