"""State dicts that are whole in every rank, of a model that ranks share.

A loop that wraps its model in a DistributedDataParallel takes each rank for one that has all of it:
its first rank saves what `state_dict()` gives. Of a DTensor that would be this rank's rows alone,
and whoever loads them would get them in the place of its own, without an error.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megacompile import compat
from megacompile.runtime.device.ranks import ranks_of
from megacompile.runtime.optim.states import to_plain


def make_whole(module: nn.Module) -> None:
    """Let `state_dict()` of a module, and of the optimizers over it that step from now on, gather
    what ranks share, into tensors on the host. From then on all ranks must call it together."""
    if module in _MODULES:
        return
    _MODULES[module] = module.register_state_dict_post_hook(_of_module)
    if not _LISTENING:
        _LISTENING.append(register_optimizer_step_pre_hook(_before_step))


def _of_module(
    module: nn.Module, found: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    del module, local_metadata
    for name, value in found.items():
        if name.startswith(prefix) and not isinstance(value, nn.Parameter):  # `keep_vars`
            found[name] = whole_on_host(value)


def _of_optimizer(optimizer: Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    del optimizer
    gathered: dict[str, Any] = compat.tree_map(whole_on_host, found)
    return gathered


def whole_on_host(value: Any) -> Any:
    """All of a tensor that ranks share, in the host's memory; any other value as it is. All ranks
    call it."""
    if not compat.is_sharded(value):
        return value
    mine = to_plain(value.detach())  # whose guard has waited for what is in flight
    return ranks_of(mine).all_of(mine).cpu()


@compat.opaque
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    del args, kwargs
    if optimizer in _OPTIMIZERS:
        return
    ours = {id(param) for module in list(_MODULES) for param in module.parameters()}
    if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        _OPTIMIZERS[optimizer] = optimizer.register_state_dict_post_hook(_of_optimizer)


_MODULES: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_OPTIMIZERS: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
_LISTENING: list[Any] = []  # to the steps of all optimizers
