"""The optimizer of the package lion-pytorch: the same operations in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """It is known by the module and the name of its class, without the package."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        self.first_lr = lr
        self.decoupled_wd = decoupled_weight_decay
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            if self.decoupled_wd:
                decay /= self.first_lr
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1.0 - lr * decay)
                p.add_(m.clone().mul_(beta1).add(p.grad, alpha=1.0 - beta1).sign_(), alpha=-lr)
                m.mul_(beta2).add_(p.grad, alpha=1.0 - beta2)
        return loss


Lion.__module__ = "lion_pytorch.lion_pytorch"
