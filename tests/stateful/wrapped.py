"""Optimizers that hold another one and step by it, as those of timm and pytorch_optimizer do.

They do not call `Optimizer.__init__`. Their `step()` reads and writes parameters, gradients and
states around the step of the optimizer inside.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Wrapper(Optimizer):
    """Shares groups with the optimizer inside. `hooks` is what its hooks of `step()` are kept in:
    plain dicts in pytorch_optimizer, ordered ones in timm."""

    hooks: Callable[[], Any] = OrderedDict

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks = self.hooks()
        self._optimizer_step_post_hooks = self.hooks()
        self.inner = inner
        self.defaults = inner.defaults
        self.own: Any = defaultdict(dict)  # the wrapper's states, by parameter
        self.count = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def params(self) -> list[nn.Parameter]:
        """Those that have a gradient."""
        found = [p for group in self.param_groups for p in group["params"]]
        return [p for p in found if p.grad is not None]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        own = [dict(self.own[p]) for g in self.param_groups for p in g["params"]]
        return {"own": own, "count": self.count, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        self.own.update(zip(params, copy.deepcopy(state_dict["own"]), strict=True))
        self.count = state_dict["count"]
        self.inner.load_state_dict(state_dict["inner"])
        self.__setstate__({})  # torch's own would: it sets some of the hooks up


class Lookahead(Wrapper):
    """Every second step draws parameters to slow ones."""

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p in self.params:
                slow = self.own[p].setdefault("slow", p.data.clone())
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)
        return loss


class ScheduleFree(Wrapper):
    """Steps on `z`, which changes places with the parameter around the step."""

    hooks = dict

    @staticmethod
    def swap(x: Tensor, y: Tensor) -> None:
        """Exchange the bits of two tensors in place."""
        for a, b in ((x, y), (y, x), (x, y)):
            a.view(torch.uint8).bitwise_xor_(b.view(torch.uint8))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self.params
        for p in params:
            z = self.own[p].setdefault("z", p.clone())
            p.lerp_(z, weight=-0.1)
            self.swap(z, p)
        self.inner.step()
        for p in params:
            z = self.own[p]["z"]
            self.swap(z, p)
            p.lerp_(z, weight=0.3)
        return loss
