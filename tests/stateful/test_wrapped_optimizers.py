"""Optimizers that hold another one and step by it: beside plain, in every bit.

Most do not call `Optimizer.__init__`, as timm's and pytorch_optimizer's. Their `step()` reads and
writes parameters, gradients and states around the step of the optimizer inside."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.stateful.side import difference
from tests.training import adamw, data, gradients, net, sgd
from tests.zoo import differences, twins

STEPS = 5
SAVED_AT = 2


class Wrapper(Optimizer):
    """Shares groups with the optimizer inside. `hooks` is what its hooks of `step()` are kept in:
    plain dicts in pytorch_optimizer, ordered ones in timm."""

    hooks: Callable[[], Any] = OrderedDict

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks = self.hooks()
        self._optimizer_step_post_hooks = self.hooks()
        self.inner = inner
        self.defaults = inner.defaults
        self.set_up()

    def set_up(self) -> None:
        """Make what is the wrapper's own."""

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
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class Lookahead(Wrapper):
    """Every second step draws parameters to slow ones."""

    def set_up(self) -> None:
        self.slow: Any = defaultdict(dict)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            for p in self.params:
                slow = self.slow[p].setdefault("slow", p.data.clone())
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        slow = [self.slow[p].get("slow") for g in self.param_groups for p in g["params"]]
        return {"slow": slow, "count": self.count, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        for p, slow in zip(params, state_dict["slow"], strict=True):
            self.slow[p] = {} if slow is None else {"slow": slow.clone()}
        self.count = state_dict["count"]
        self.inner.load_state_dict(state_dict["inner"])


class Reloads(Lookahead):
    """Its own states go through torch's `load_state_dict()`, which sets some of the hooks up."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.__setstate__({})


class ScheduleFree(Wrapper):
    """Steps on `z`, which changes places with the parameter around the step."""

    hooks = dict

    def set_up(self) -> None:
        self.own: Any = defaultdict(dict)

    @staticmethod
    def swap(x: Tensor, y: Tensor) -> None:
        """Exchange the bits of two tensors in place."""
        x.view(torch.uint8).bitwise_xor_(y.view(torch.uint8))
        y.view(torch.uint8).bitwise_xor_(x.view(torch.uint8))
        x.view(torch.uint8).bitwise_xor_(y.view(torch.uint8))

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

    def state_dict(self) -> dict[str, Any]:
        own = [dict(self.own[p]) for g in self.param_groups for p in g["params"]]
        return {"own": own, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        self.own.update(zip(params, copy.deepcopy(state_dict["own"]), strict=True))
        self.inner.load_state_dict(state_dict["inner"])


class Trac(Wrapper):
    """Scales the way from where it began, which it keeps in the state of the optimizer inside."""

    hooks = dict

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = self.inner.step(closure)
        if "trac" not in self.state:
            self.state["trac"] = [p.clone() for p in self.params]
        pairs = list(zip(self.params, self.state["trac"], strict=True))
        inner = torch.zeros(())
        for p, began in pairs:
            assert p.grad is not None
            inner += torch.dot((p - began).flatten(), p.grad.flatten())
        for p, began in pairs:
            way = p - began
            p.copy_(began)
            p.add_(way * (0.9 if inner < 0 else 1.0))
        return loss


class Forwards(Optimizer):
    """Has nothing but the optimizer inside."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


WRAPPERS = (Lookahead, Reloads, ScheduleFree, Trac, Forwards)


def train(
    model: nn.Module, make: Callable[[nn.Module], list[Optimizer]], kind: Any, *, closure: bool
) -> list[Any]:
    """Losses, and the states after each step; halfway a new optimizer goes on from the states."""
    optimizer = kind(make(model)[0])
    seen: list[Any] = []
    for i in range(STEPS):
        optimizer.zero_grad()
        if closure:

            def loss_of(i: int = i, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(**data(i))
                loss.backward()
                return loss

            seen.append(optimizer.step(loss_of).detach())
        else:
            gradients(model, i)
            optimizer.step()
        if i == SAVED_AT:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = kind(make(model)[0])
            optimizer.load_state_dict(saved)
        seen.append(copy.deepcopy(optimizer.state_dict()))
    return seen


def test_wrappers() -> None:
    """Around AdamW, and around SGD with a closure, over one captured model."""
    plain, streamed = twins(net())
    start = copy.deepcopy(plain.state_dict())
    cases = [(adamw, False), (functools.partial(sgd, momentum=0.9), True)]
    for kind, (make, closure) in itertools.product(WRAPPERS, cases):
        found = []
        for model in (plain, streamed):
            model.zero_grad()
            model.load_state_dict(start)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found.append(train(model, make, kind, closure=closure))
        assert difference(found[0], found[1]) == "", kind
        assert differences(plain, streamed) == [], kind
