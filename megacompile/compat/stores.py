"""The store of `torch.distributed`: a few bytes that all processes see."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# It is gone, or does not answer.
STORE_ERRORS: tuple[type[Exception], ...] = (dist.DistError,)  # torch 2.11 to 2.15


def store(prefix: str, *, timeout_s: float) -> Any:  # torch 2.11 to 2.15
    """A client of the default process group's store, with keys of its own.

    Each thread needs one: a client serves one request at a time.
    """
    c10d: Any = dist.distributed_c10d
    shared: Any = c10d._get_default_store()
    try:
        own = shared.clone()
    except (AttributeError, RuntimeError):  # a kind of store that cannot
        own = shared
    else:
        own.set_timeout(timedelta(seconds=timeout_s))
    return c10d.PrefixStore(prefix, own)


def group_timeout_s(group: Any, device: torch.device) -> tuple[float, bool]:  # torch 2.11 to 2.15
    """Time limit of a collective of a group, seconds, and whether torch chose it."""
    from torch.distributed import constants

    timeout = group._get_backend(device).options._timeout
    chosen = (constants.default_pg_timeout, getattr(constants, "default_pg_nccl_timeout", None))
    return timeout.total_seconds(), timeout in chosen


def serve_the_host(group: Any, device: torch.device) -> None:  # torch 2.11 to 2.15
    """Makes a group's collectives take tensors on the host too, by gloo; all of its ranks call it.

    A group that torch makes without a name of a backend does; one of "nccl" does not, and DTensors
    whose parts are on the host have none but their mesh's groups: in `full_tensor()`, in norms.

    Args:
        device: of the tensors that the group takes, and waits for as long.
    """
    host = torch.device("cpu")
    if host in group._device_types:
        return
    ranks = dist.get_process_group_ranks(group)
    timeout = timedelta(seconds=group_timeout_s(group, device)[0])
    gloo: Any = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(host, kind, gloo._get_backend(host))


def abort(group: Any) -> None:  # torch 2.11 to 2.15
    """End a group's collectives that other ranks do not answer, where the backend can do that."""
    end = getattr(group, "abort", None)
    if end is not None:
        end()
