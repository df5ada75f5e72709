"""torch.optim and torch.amp's GradScaler."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from megacompile.compat.autograd import backward_id


def notice_scaled_losses() -> None:  # torch 2.11 to 2.15
    """Records every loss that a GradScaler scales from now on, for `loss_is_scaled`."""
    stock = torch.amp.GradScaler.scale
    if hasattr(stock, "noticed"):
        return

    def note(gradient: torch.Tensor) -> None:
        del gradient
        _SCALED[:] = [backward_id()]

    @functools.wraps(stock)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = stock(self, outputs)
        for value in _pytree.tree_leaves(scaled) if self.is_enabled() else ():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(note)
        return scaled

    scale.noticed = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def loss_is_scaled() -> bool:  # torch 2.11 to 2.15
    """Inside a backward: true if it came through a loss that a GradScaler scaled."""
    return backward_id() in _SCALED


_SCALED: list[int] = []  # the last backward that did


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:  # torch 2.11 to 2.15
    """An optimizer's step, without the hooks that users registered for all optimizers."""
    step: Any = type(optimizer).step
    inspect.unwrap(step, stop=lambda f: not getattr(f, "hooked", False))(optimizer)


def takes_hooks(optimizer: torch.optim.Optimizer) -> bool:  # torch 2.11 to 2.15
    """True if hooks can be registered on an optimizer: `Optimizer.__init__` has run.

    Many wrappers (timm's Lookahead) do not call it. They make two dicts for the hooks of `step()`
    themselves, because `zero_grad()` lets `step()` call hooks; these are often plain dicts, which
    no handle can refer to.
    """
    return all(isinstance(vars(optimizer).get(name), OrderedDict) for name in _HOOKS)


_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
)


def keep_state_dtypes(ours: Callable[[torch.Tensor], bool]) -> None:  # torch 2.11 to 2.15
    """Makes `Optimizer.load_state_dict` keep the dtype of states of the parameters that are `ours`.

    It casts them to the parameter's: float32 moments of a bfloat16 parameter would lose bits.
    """
    _STATES_KEPT.append(ours)
    stock = torch.optim.Optimizer._process_value_according_to_param_policy
    if hasattr(stock, "keeps_states"):
        return

    def policy(param: Any, value: Any, param_id: Any, param_groups: Any, key: Any = None) -> Any:
        if key != "step" and any(mine(param) for mine in _STATES_KEPT):
            return value.to(device=param.device)
        return stock(param, value, param_id, param_groups, key)

    policy.keeps_states = True  # type: ignore[attr-defined]
    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(policy)  # type: ignore[method-assign]


_STATES_KEPT: list[Callable[[torch.Tensor], bool]] = []
