"""Hooks that let a model's inputs require grad, in a form that Dynamo captures.

transformers and PEFT register one on the embedding of a model with frozen weights, for reentrant
checkpoints: `output.requires_grad_(True)`. Dynamo captures no such change, and the graph would
break at each of its callers. During a call an addition of -0.0, which changes no bit, is in its
place: its sum requires grad too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.runtime.params.undo import Undos, exchange

_NAMES = ("make_inputs_require_grads", "make_inputs_require_grad")  # transformers, PEFT


class InputHooks:
    """The hooks of a model, and the exchange."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hook: Any = None

    def swap_in(self, model: nn.Module, undos: Undos) -> None:
        """Until the undos run, what Dynamo captures is in the place of such hooks."""
        found = [
            (hooks, key, hook)
            for module in model.modules()
            for hooks in (compat.forward_hooks_of(module),)
            for key, hook in hooks.items()
            if getattr(hook, "__name__", "") in _NAMES
        ]
        if not found:
            return
        holders, keys, theirs = map(list, zip(*found, strict=True))
        ours = [self._made()] * len(found)
        undos.append(functools.partial(exchange, holders, keys, ours, theirs))
        exchange(holders, keys, theirs, ours)

    def _made(self) -> Any:
        if self._hook is None:
            with torch.inference_mode(False):
                zero = torch.full((), -0.0, device=self.device, requires_grad=True)

            def require_grad(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                del module, args
                return output + zero

            self._hook = require_grad
        return self._hook
