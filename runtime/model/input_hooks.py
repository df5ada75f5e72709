"""Hooks that make a model's inputs require grad, in a form that Dynamo captures.

transformers and PEFT register one on the embedding of a model with frozen weights, for reentrant
checkpoints: `output.requires_grad_(True)`. Dynamo cannot capture this, and the graph would break at
each caller. During a call, the hook is replaced by an addition of -0.0, which changes no bit and
whose sum requires grad too.

transformers adds another hook each time checkpoints are enabled again, as TRL does in every step,
and never removes it. Consecutive hooks have the effect of one, so a call keeps one: Dynamo would
recapture the model whenever the number of hooks changes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.runtime.params.undo import Undos, replace

_NAMES = ("make_inputs_require_grads", "make_inputs_require_grad")  # transformers, PEFT


class InputHooks:
    """Replaces the hooks of a model during a call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hook: Any = None

    def swap_in(self, modules: Iterable[nn.Module], undos: Undos) -> None:
        """Replace such hooks by a form that Dynamo captures, until the undos run."""
        found = [
            (hooks, key, hook)
            for hooks in compat.holders_of_forward_hooks(modules)
            for key, hook in hooks.items()
            if _is_ours(hook)
        ]
        if not found:
            return
        if len(found) > 1:
            for hooks in {id(hooks): hooks for hooks, _, _ in found}.values():
                _leave_out(hooks, undos)
            found = [item for item in found if item[1] in item[0]]
        holders, keys, theirs = map(list, zip(*found, strict=True))
        ours = [self._made()] * len(found)
        replace(holders, keys, theirs, ours, undos)

    def _made(self) -> Any:
        if self._hook is None:
            with torch.inference_mode(False):
                zero = torch.full((), -0.0, device=self.device, requires_grad=True)

            def require_grad(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                del module, args
                return output + zero

            self._hook = require_grad
        return self._hook


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__name__", "") in _NAMES


def _leave_out(hooks: dict[int, Any], undos: Undos) -> None:
    """Remove repeated consecutive hooks of a module, until the undos run."""
    keys = list(hooks)
    pairs = zip(keys, keys[1:], strict=False)
    again = [key for before, key in pairs if _is_ours(hooks[before]) and _is_ours(hooks[key])]
    if again:
        undos.append(functools.partial(_put_back, hooks, keys, {k: hooks[k] for k in again}))
        deque(map(hooks.pop, again), maxlen=0)


def _put_back(hooks: dict[int, Any], order: list[int], again: dict[int, Any]) -> None:
    """Restore the removed hooks and the original order."""
    hooks.update(again)
    later = [key for key in hooks if key not in order]
    for key in [*(key for key in order if key in hooks), *later]:
        hooks[key] = hooks.pop(key)
