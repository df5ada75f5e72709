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
        DTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    return _DTENSOR[0]


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a DTensor. Torch's own fails where the part is behind the beginning of
    its memory, as in a bucket: it takes the offset for an address, and the DTensor for a tensor
    with memory of its own."""
    if id(self) not in memo:
        with torch.no_grad():
            made: Any = like(self, local(self).detach().clone())
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made.requires_grad_(self.requires_grad)
    return memo[id(self)]


def is_sharded(tensor: object) -> bool:  # torch 2.11 to 2.15
    """True if this rank has a part of the tensor."""
    return bool(_DTENSOR) and isinstance(tensor, _DTENSOR[0])


def local(tensor: Any) -> Any:  # torch 2.11 to 2.15
    """This rank's part of a tensor, without asking a guard; any other value as it is."""
    if not _DTENSOR or not isinstance(tensor, _DTENSOR[0]):
        return tensor
    return _LOCAL[0].__get__(tensor)


def locals_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:  # torch 2.11 to 2.15
    """`local` of each."""
    return [local(tensor) for tensor in tensors] if _DTENSOR else tensors


def set_local(tensor: torch.Tensor, part: torch.Tensor) -> None:  # torch 2.11 to 2.15
    """Gives a tensor another part of this rank's, of the same shape; also on another device."""
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
    return _over(part, spec.mesh, spec.placements, spec.shape, spec.stride)


def _over(
    part: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Any, stride: Any
) -> torch.Tensor:  # torch 2.11 to 2.15
    """A DTensor over this very tensor: `DTensor.from_local` would move it to the mesh's devices."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), tuple(stride), part.dtype)
    made: Any = use_dtensor()
    found: torch.Tensor = made(
        part, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False
    )
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
    strides = torch.empty(shape, device="meta").stride()
    whole = _over(part.detach(), mesh, placements, shape, strides)
    return nn.Parameter(whole, requires_grad=requires_grad)


def mesh_of(tensor: torch.Tensor) -> Any:  # torch 2.11 to 2.15
    """The mesh of a DTensor."""
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    return spec.mesh


def distributed(value: torch.Tensor, like_: torch.Tensor) -> torch.Tensor:  # torch 2.11 to 2.15
    """A tensor that every rank has whole, laid out over ranks as a DTensor: nothing is sent."""
    from torch.distributed.tensor import Replicate

    spec: Any = like_._spec  # type: ignore[attr-defined]
    everywhere = [Replicate()] * spec.mesh.ndim
    whole: Any = _over(value.detach(), spec.mesh, everywhere, value.shape, value.stride())
    with torch.no_grad():
        part: torch.Tensor = local(whole.redistribute(placements=spec.placements))
    return like(like_, part.to(local(like_).device))


def whole(like_: torch.Tensor, part: torch.Tensor) -> torch.Tensor:  # torch 2.11 to 2.15
    """All of a tensor of which each rank has a part, laid out as a DTensor: a collective."""
    with torch.no_grad():
        gathered: torch.Tensor = like(like_, part).full_tensor()  # type: ignore[attr-defined]
    return gathered


def averaged(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:  # torch 2.11 to 2.15
    """The mean over ranks of a gradient, laid out as a DTensor: a collective."""
    from torch.distributed.tensor import Partial

    spec: Any = param._spec  # type: ignore[attr-defined]
    sums = [Partial()] * spec.mesh.ndim
    with torch.no_grad():
        mine = gradient / spec.mesh.size()
        partial: Any = _over(mine, spec.mesh, sums, mine.shape, mine.stride())
        mean = partial.redistribute(placements=spec.placements)
        return like(param, local(mean).to(local(param).device))


# torch 2.13 gave these collectives other names
ALL_GATHER: Any = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # torch 2.11 to 2.15
REDUCE_SCATTER: Any = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)  # torch 2.11 to 2.15


def coalesced(
    group: Any, device: torch.device
) -> AbstractContextManager[Any]:  # torch 2.11 to 2.15
    """Collectives in it are one launch, where the backend can do that."""
    if device.type != "cuda":
        return nullcontext()
    c10d: Any = dist  # whose stubs leave it out
    context: AbstractContextManager[Any] = c10d._coalescing_manager(group=group, device=device)
    return context
