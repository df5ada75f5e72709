"""torch.distributed, DistributedDataParallel and DataParallel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree


def ddp_around() -> torch.nn.parallel.DistributedDataParallel | None:  # torch 2.11 to 2.15
    """The DistributedDataParallel whose forward is running."""
    ddp = torch.nn.parallel.DistributedDataParallel
    found: torch.nn.parallel.DistributedDataParallel | None = ddp._get_active_ddp_module()
    return found


def ddp_parameters(
    ddp: torch.nn.parallel.DistributedDataParallel,
) -> list[torch.nn.Parameter]:  # torch 2.11 to 2.15
    """The parameters that a DistributedDataParallel looks after."""
    return list(ddp._module_parameters)


def check_data_parallel(
    kind: type[torch.nn.Module], check: Callable[[Any, dict[str, Any]], bool]
) -> None:  # torch 2.11 to 2.15
    """Call `check` with every module of a kind and its arguments, before it is made. Where it says
    True, it has made it.

    Args:
        kind: DistributedDataParallel, or DataParallel.
    """
    stock: Any = kind.__init__
    if hasattr(stock, "checked"):
        return
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not check(self, signature.bind(self, *args, **kwargs).arguments):
            stock(self, *args, **kwargs)

    init.checked = True  # type: ignore[attr-defined]
    kind.__init__ = init  # type: ignore[method-assign]


_COLLECTIVES = (
    "all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single broadcast gather "
    "recv reduce reduce_scatter reduce_scatter_tensor scatter send"
).split()


def ask_before_collectives(ask: Callable[[Any], None]) -> None:  # torch 2.11 to 2.15
    """Call `ask` with each tensor that is given to a collective of `torch.distributed`.

    On torch 2.11, some take a tensor subclass for a plain tensor (2.12 asks the subclass).
    Code that has imported one by its name before megacompile was imported calls it as it is.
    """
    if not torch.distributed.is_available():
        return
    for name in _COLLECTIVES:
        stock = getattr(torch.distributed, name)

        @functools.wraps(stock)
        def collective(*args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            for value in _pytree.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    ask(value)
            return stock(*args, **kwargs)

        setattr(torch.distributed, name, collective)
        setattr(torch.distributed.distributed_c10d, name, collective)


def send_no_parts(is_part: Callable[[Any], bool]) -> None:  # torch 2.11 to 2.15
    """Makes the function that equalises ranks (`_broadcast_coalesced`: Lightning calls it before it
    evaluates) leave out tensors of which each rank has another part; torch refuses them."""
    distributed: Any = torch.distributed
    stock = distributed._broadcast_coalesced
    if hasattr(stock, "sends_no_parts"):
        return

    @functools.wraps(stock)
    def broadcast(process_group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        copies = [tensor for tensor in tensors if not is_part(tensor)]
        return stock(process_group, copies, *args, **kwargs) if copies else None

    broadcast.sends_no_parts = True  # type: ignore[attr-defined]
    distributed._broadcast_coalesced = broadcast
