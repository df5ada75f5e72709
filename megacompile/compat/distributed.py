"""torch.distributed: DTensors, its store and groups, DistributedDataParallel and DataParallel.

A `DTensor` wraps one plain tensor, `_local_tensor`: this rank's part. Buckets need that tensor; the
public `to_local()` creates a new one, in autograd's graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree

from megacompile.compat.patches import replace

_DTENSOR: list[type[torch.Tensor]] = []  # `DTensor`, imported at first use: slow
_LOCAL: list[Any] = []  # the descriptor of `DTensor._local_tensor`


def use_dtensor() -> type[torch.Tensor]:
    """`DTensor`; after this, `local` handles it."""
    if not _DTENSOR:
        from torch.distributed.tensor import DTensor

        _LOCAL.append(DTensor._local_tensor)
        _DTENSOR.append(DTensor)
        DTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    return _DTENSOR[0]


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy` of a DTensor. torch's own fails if the part has a storage offset."""
    if id(self) not in memo:
        with torch.no_grad():
            made: Any = like(self, local(self).detach().clone())
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, requires_grad=self.requires_grad)
        memo[id(self)] = made.requires_grad_(self.requires_grad)
    return memo[id(self)]


def is_sharded(tensor: object) -> bool:
    """True for a DTensor, of which this rank has a part."""
    return bool(_DTENSOR) and isinstance(tensor, _DTENSOR[0])


def local(tensor: Any) -> Any:
    """This rank's part of a tensor, bypassing guards; any other value unchanged."""
    if not _DTENSOR or not isinstance(tensor, _DTENSOR[0]):
        return tensor
    return _LOCAL[0].__get__(tensor)


def locals_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """`local` of each tensor."""
    return [local(tensor) for tensor in tensors] if _DTENSOR else tensors


def set_local(tensor: torch.Tensor, part: torch.Tensor) -> None:
    """Replace this rank's part of a tensor by one of the same shape, possibly on another device;
    the data of a tensor that ranks do not share."""
    if not is_sharded(tensor):
        tensor.data = part
        return
    if tensor.device != part.device:
        with torch.no_grad():
            tensor.data = like(tensor, part)
    _LOCAL[0].__set__(tensor, part)


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor over `part` with the layout of another DTensor; `part` itself if the other is a
    plain tensor."""
    if not is_sharded(tensor):
        return part
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    return _over(part, spec.mesh, spec.placements, spec.shape, spec.stride)


def _over(
    part: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Any, stride: Any
) -> torch.Tensor:
    """A DTensor over this tensor object, which `DTensor.from_local` would move to other devices."""
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
) -> nn.Parameter:
    """A sharded parameter of this shape; this rank has `part`."""
    strides = torch.empty(shape, device="meta").stride()
    whole = _over(part.detach(), mesh, placements, shape, strides)
    return nn.Parameter(whole, requires_grad=requires_grad)


def distributed(value: torch.Tensor, like_: torch.Tensor) -> torch.Tensor:
    """Shard a tensor that every rank has whole, without communication."""
    from torch.distributed.tensor import Replicate

    return _redistributed(value.detach(), like_, Replicate())


def _redistributed(value: torch.Tensor, like_: torch.Tensor, placement: Any) -> torch.Tensor:
    """A DTensor with the layout of another one, from this rank's `value` of this placement."""
    spec: Any = like_._spec  # type: ignore[attr-defined]
    placements = [placement] * spec.mesh.ndim
    given: Any = _over(value, spec.mesh, placements, value.shape, value.stride())
    with torch.no_grad():
        part: torch.Tensor = local(given.redistribute(placements=spec.placements))
    return like(like_, part.to(local(like_).device))


def whole(like_: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The full tensor of parts with a DTensor's layout: a collective."""
    with torch.no_grad():
        gathered: torch.Tensor = like(like_, part).full_tensor()  # type: ignore[attr-defined]
    return gathered


def averaged(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The mean over ranks of a gradient, with a DTensor's layout: a collective."""
    from torch.distributed.tensor import Partial

    spec: Any = param._spec  # type: ignore[attr-defined]
    with torch.no_grad():
        return _redistributed(gradient / spec.mesh.size(), param, Partial())


# torch 2.13 renamed these collectives
ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def coalesced(group: Any, device: torch.device) -> AbstractContextManager[Any]:
    """A context that coalesces collectives into one launch if the backend supports it."""
    if device.type != "cuda":
        return nullcontext()
    c10d: Any = dist  # its stubs leave it out
    context: AbstractContextManager[Any] = c10d._coalescing_manager(group=group, device=device)
    return context


# Errors of a store that is gone or does not answer.
STORE_ERRORS: tuple[type[Exception], ...] = (dist.DistError,)


def store(prefix: str, *, timeout_s: float) -> Any:
    """A client of the default process group's store, with its own key prefix. Each thread needs
    one: a client serves one request at a time."""
    c10d: Any = dist.distributed_c10d
    own: Any = c10d._get_default_store()
    with suppress(AttributeError, RuntimeError):  # a kind of store without clones
        own = own.clone()
        own.set_timeout(timedelta(seconds=timeout_s))
    return c10d.PrefixStore(prefix, own)


def group_timeout_s(group: Any, device: torch.device) -> tuple[float, bool]:
    """Time limit of a collective of a group, seconds, and whether torch chose it."""
    from torch.distributed import constants

    timeout = group._get_backend(device).options._timeout
    chosen = (constants.default_pg_timeout, getattr(constants, "default_pg_nccl_timeout", None))
    return timeout.total_seconds(), timeout in chosen


def serve_the_host(group: Any, device: torch.device) -> None:
    """Add gloo, with the timeout of the backend for `device`, to a group that supports no host
    tensors ("nccl"); all of its ranks call this. `full_tensor()` and norms of DTensors with parts
    on the host need it."""
    host = torch.device("cpu")
    if host in group._device_types:
        return
    ranks = dist.get_process_group_ranks(group)
    timeout = timedelta(seconds=group_timeout_s(group, device)[0])
    gloo: Any = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(host, kind, gloo._get_backend(host))


# The DistributedDataParallel whose forward is running.
ddp_around: Callable[[], torch.nn.parallel.DistributedDataParallel | None] = (
    torch.nn.parallel.DistributedDataParallel._get_active_ddp_module
)


def ddp_parameters(ddp: torch.nn.parallel.DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters that a DistributedDataParallel reduces."""
    return list(ddp._module_parameters)


def check_data_parallel(
    kind: type[torch.nn.Module], check: Callable[[Any, dict[str, Any]], bool]
) -> None:
    """Call `check` with every new module of a kind (DistributedDataParallel, DataParallel) and its
    arguments, before `__init__`; it returns true if it has initialized the module itself."""

    def init(stock: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if not check(self, inspect.signature(stock).bind(self, *args, **kwargs).arguments):
            stock(self, *args, **kwargs)

    replace(kind, "__init__", init)


_COLLECTIVES = (
    "all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single broadcast gather "
    "recv reduce reduce_scatter reduce_scatter_tensor scatter send"
).split()


def ask_before_collectives(ask: Callable[[Any], None]) -> None:
    """Call `ask` with each tensor argument of a collective of `torch.distributed`. On torch 2.11,
    some collectives treat a tensor subclass as a plain tensor (2.12 dispatches to the subclass)."""

    def collective(stock: Any, *args: Any, **kwargs: Any) -> Any:
        for value in _pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                ask(value)
        return stock(*args, **kwargs)

    for name in _COLLECTIVES:
        replace(torch.distributed, name, collective)
        setattr(dist.distributed_c10d, name, getattr(dist, name))


def send_no_parts(is_part: Callable[[Any], bool]) -> None:
    """Makes `_broadcast_coalesced` skip tensors of which each rank has its own part; torch rejects
    them. Lightning calls this function before it evaluates."""

    def broadcast(stock: Any, group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        copies = [tensor for tensor in tensors if not is_part(tensor)]
        return stock(group, copies, *args, **kwargs) if copies else None

    replace(torch.distributed, "_broadcast_coalesced", broadcast)
