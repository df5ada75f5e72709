"""DTensors: the part of a tensor that this rank has, under the tensor's own name.

A `DTensor` is a wrapper over one plain tensor, `_local_tensor`. Its public `to_local()` makes a new
tensor with every call, dispatches, and goes through autograd; buckets need that very tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_DTENSOR: list[type[torch.Tensor]] = []  # `DTensor`, once a mesh is used: it takes long to import
_LOCAL: list[Any] = []  # the descriptor of `DTensor._local_tensor`


def use_dtensor() -> type[torch.Tensor]:  # torch 2.11 to 2.15
    """`DTensor`; from now on `local` knows it."""
    if not _DTENSOR:
        from torch.distributed.tensor import DTensor

        _LOCAL.append(DTensor._local_tensor)
        _DTENSOR.append(DTensor)
    return _DTENSOR[0]


def is_sharded(tensor: object) -> bool:
    """Is it a tensor of which this rank has a part?"""
    return bool(_DTENSOR) and isinstance(tensor, _DTENSOR[0])


def local(tensor: Any) -> Any:  # torch 2.11 to 2.15
    """This rank's part of a tensor, without asking a guard; any other value as it is."""
    return _LOCAL[0].__get__(tensor) if is_sharded(tensor) else tensor


def set_local(tensor: torch.Tensor, part: torch.Tensor) -> None:  # torch 2.11 to 2.15
    """Let a tensor have another part of this rank's, of the same shape; also on another device."""
    if tensor.device != part.device:
        with torch.no_grad():
            tensor.data = like(tensor, part)
    _LOCAL[0].__set__(tensor, part)


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:  # torch 2.11 to 2.15
    """A tensor of which this rank has `part`, laid out over ranks as another one; where that is no
    DTensor, `part` itself."""
    if not is_sharded(tensor):
        return part
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    made: Any = _DTENSOR[0]
    plain = type(part) is torch.Tensor
    looks = part if plain else torch.empty(1, dtype=part.dtype, device=part.device)
    found: torch.Tensor = made.from_local(
        looks if plain else looks.expand(part.shape),  # it makes a view: of a subclass, a copy
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )
    if not plain:
        _LOCAL[0].__set__(found, part)
    return found


def sharded_parameter(
    part: torch.Tensor,  # contiguous, the rows of this rank
    mesh: Any,
    placements: Sequence[Any],
    shape: torch.Size,
    *,
    requires_grad: bool,
) -> nn.Parameter:  # torch 2.11 to 2.15
    """A parameter of a shape of which this rank has `part`."""
    made: Any = use_dtensor()
    strides = torch.empty(shape, device="meta").stride()
    whole = made.from_local(
        part.detach(), mesh, placements, run_check=False, shape=shape, stride=strides
    )
    return nn.Parameter(whole, requires_grad=requires_grad)


def mesh_of(tensor: torch.Tensor) -> Any:  # torch 2.11 to 2.15
    """The mesh of a DTensor."""
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    return spec.mesh


def distributed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:  # torch 2.11 to 2.15
    """A tensor that every rank has whole, laid out over ranks as a DTensor: nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    spec: Any = like._spec  # type: ignore[attr-defined]
    part = local(like)
    return distribute_tensor(value.to(part.device), spec.mesh, spec.placements, src_data_rank=None)


def whole(like_: torch.Tensor, part: torch.Tensor) -> torch.Tensor:  # torch 2.11 to 2.15
    """All of a tensor of which each rank has a part, laid out as a DTensor: a collective."""
    with torch.no_grad():
        gathered: torch.Tensor = like(like_, part).full_tensor()  # type: ignore[attr-defined]
    return gathered


def averaged(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:  # torch 2.11 to 2.15
    """The mean over ranks of a gradient, laid out as a DTensor: a collective."""
    from torch.distributed.tensor import Partial

    spec: Any = param._spec  # type: ignore[attr-defined]
    made: Any = _DTENSOR[0]
    with torch.no_grad():
        partial = made.from_local(
            gradient / spec.mesh.size(), spec.mesh, [Partial()] * spec.mesh.ndim, run_check=False
        )
        mean = partial.redistribute(placements=spec.placements)
        return like(param, local(mean).to(local(param).device))


# torch 2.14 gave these collectives other names
ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def coalesced(
    group: Any, device: torch.device
) -> AbstractContextManager[Any]:  # torch 2.11 to 2.15
    """Collectives in it are one launch, where the backend can do that."""
    if device.type != "cuda":
        return nullcontext()
    c10d: Any = dist  # whose stubs leave it out
    context: AbstractContextManager[Any] = c10d._coalescing_manager(group=group, device=device)
    return context
