"""Hooks on stock optimizers that notify megacompiled models of `optimizer.step()`.

`before` runs after the user's own pre-hooks, `after` ahead of the user's own post-hooks:

    user's pre-hooks
    before   every model prepares its part and hides its gradients;
             torch.optim steps for the remaining parameters, whose gradients are then hidden too
    torch.optim's own step, which sees no gradients
    after    every part is started, and the gradients are restored
    user's post-hooks

Preparing updates no parameter. So a step that raises (in a hook, a closure, a model that refuses,
or torch.optim on other parameters) has updated no streamed parameter, counted nothing and kept the
gradients, and can be called again. Updates already made by a backward (`optimizer=`) are counted
when the step is prepared: they are done in any case.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megacompile import compat
from megacompile.garbage import every_object
from megacompile.runtime.device.background import WeakIdSet
from megacompile.runtime.optim.blockwise import to_plain
from megacompile.runtime.optim.registry import known
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.optimizer_states import add_one, count_up, drop_empty, reserve
from megacompile.runtime.updates.update import BucketUpdate


@dataclass(eq=False, slots=True)
class PreparedStep:
    """One model's part of an `optimizer.step()`, from its preparation to its start."""

    optimizer: Optimizer
    parts: list[BucketUpdate] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)  # the parameters that it updates
    gradients: list[Any] = field(default_factory=list)  # their states
    states: list[dict[str, Any]] = field(default_factory=list)
    """Their future states; empty if the optimizer's states stay as they are."""
    counters: list[torch.Tensor] = field(default_factory=list)  # counters in these states

    def drop(self) -> None:
        """Cancel the part."""
        for part in self.parts:
            part.drop()

    def count(self) -> None:
        """Count the step in the optimizer's own counters."""
        add_one(self.counters)
        count_up(self.states)
        for param, state in zip(self.params, self.states, strict=bool(self.states)):
            if state:
                self.optimizer.state[param].update(state)


class Model(Protocol):
    """An object that is notified of optimizer steps."""

    def owns(self, param: torch.Tensor) -> bool:
        """True for a parameter of this model."""

    def prepare_step(self, optimizer: Optimizer) -> PreparedStep | None:
        """Prepare the model's part of a starting step; None if torch.optim does everything."""

    def start(self, step: PreparedStep) -> None:
        """Run the part, or start it in the background."""

    def settle(self) -> None:
        """Wait for all work in flight; raises failures whose values were not loaded since."""

    def finish(self) -> None:
        """Wait for all work in flight and record failures."""


def tell(model: Model) -> None:
    """Notify a model of the steps of all optimizers over its parameters, by weak reference."""
    _LIVE.add(model)


def optimizers_of(model: Model) -> list[Optimizer]:
    """The optimizers that have stepped over parameters of a model."""
    return [optimizer for optimizer in list(_ATTACHED) if _is_over(optimizer, model.owns)]


def constructed(owns: Callable[[torch.Tensor], bool]) -> list[Optimizer]:
    """The optimizers over parameters of a model, even before their first step.

    They are unknown before they step, so all live objects are searched: tens of milliseconds,
    without a Python loop.
    """
    everything, kinds = every_object(), set(_kinds(Optimizer))
    found = compress(everything, map(kinds.__contains__, map(type, everything)))
    return [optimizer for optimizer in found if _is_over(optimizer, owns)]


def _kinds(base: type) -> Iterator[type]:
    """A class and all its subclasses."""
    yield base
    made: list[type] = type.__subclasses__(base)
    for kind in made:
        yield from _kinds(kind)


def leave(model: Model, optimizers: Iterable[Optimizer]) -> None:
    """Stop notifying a model and remove the hooks from its optimizers.

    Args:
        model: the model that releases its parameters.
        optimizers: the model's optimizers; those with parameters of another model keep their hooks.
    """
    _LIVE.discard(model)
    for optimizer in optimizers:
        others = any(_is_over(optimizer, other.owns) for other in _LIVE)
        if optimizer in _ATTACHED and not others:
            for handle in _ATTACHED.pop(optimizer).handles:
                handle.remove()


def _is_over(optimizer: Optimizer, owns: Callable[[torch.Tensor], bool]) -> bool:
    groups = getattr(optimizer, "param_groups", ())  # or a wrapper
    return any(owns(p) for group in groups for p in group["params"])


def attach(optimizer: Optimizer) -> None:
    """Register the hooks on an optimizer before its first step."""
    _hooks_on(optimizer)


def convert_state_dicts(optimizer: Optimizer) -> None:
    """Return 8-bit states in `state_dict()` as float32 tensors, which a plain run can load."""
    hooks = _hooks_on(optimizer)
    if not hooks.converts:
        hooks.converts = True
        handle = optimizer.register_state_dict_post_hook(lambda _, found: to_plain(found))
        hooks.handles.append(handle)


class _Hooks:
    """The hooks on one optimizer."""

    def __init__(self) -> None:
        self.parts: list[tuple[Model, PreparedStep]] = []  # of the running step
        self.hidden: list[tuple[nn.Parameter, Any]] = []
        self.reserved: list[nn.Parameter] = []  # parameters without states at its start
        self.converts = False  # 8-bit states in state_dict()
        self.handle: Any = None  # of `before`
        self.handles: list[Any] = []  # handles of all hooks

    @compat.opaque
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare the models' parts; a closure is called first, because it computes the
        gradients."""
        self._give_up(optimizer)  # does nothing unless the last step was interrupted
        closure = None
        if known(type(optimizer)) is not None:
            closure, args, kwargs = _closure(args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args = (*args, lambda: loss)
        try:
            with unguarded(), compat.on_host():
                for model in _LIVE:
                    part = model.prepare_step(optimizer)
                    if part is not None:
                        self.parts.append((model, part))
                changes_states = False
                for _, part in self.parts:
                    self._hide(zip(part.params, part.gradients, strict=True))
                    changes_states |= bool(part.states)
                left = _with_gradients(optimizer) if self.parts else []
                if left or changes_states:
                    trained = [param for param, _ in (*self.hidden, *left)]
                    new = [param for param in trained if param not in optimizer.state]
                    self.reserved = reserve(optimizer, new) if new else []
            if left:
                compat.step_without_hooks(optimizer)
                self._hide(left)
        except BaseException:
            self._give_up(optimizer)
            raise
        return args, kwargs

    @compat.opaque
    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Start the models' parts and restore the gradients."""
        del args, kwargs
        with unguarded(), compat.on_host():
            try:
                while self.parts:
                    model, part = self.parts.pop(0)
                    model.start(part)
            finally:
                self._give_up(optimizer)

    def _hide(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        for param, gradient in gradients:
            self.hidden.append((param, gradient))
            param.grad = None

    def _give_up(self, optimizer: Optimizer) -> None:
        """Restore the gradients and drop unstarted parts."""
        with unguarded():
            drop_empty(optimizer, self.reserved)
            self.reserved = []
            for param, gradient in self.hidden:
                if param.grad is None:
                    param.grad = gradient
            self.hidden = []
            while self.parts:
                self.parts.pop()[1].drop()


def _before_state_dict(optimizer: Optimizer) -> None:
    """Raise, when an optimizer is saved, if values are half updated."""
    with unguarded():
        for model in _LIVE:
            if _is_over(optimizer, model.owns):
                model.settle()


def _before_load(optimizer: Optimizer, state_dict: Any) -> None:
    """Mark half-updated states as whole if loaded states replace them."""
    del state_dict
    with unguarded():
        for model in _LIVE:
            if _is_over(optimizer, model.owns):
                model.finish()


def _with_gradients(optimizer: Optimizer) -> list[tuple[nn.Parameter, Any]]:
    return [
        (param, gradient)
        for group in optimizer.param_groups
        for param in group["params"]
        if (gradient := param.grad) is not None
    ]


def _closure(args: Any, kwargs: Any) -> tuple[Callable[[], Any] | None, Any, Any]:
    """The closure in a step's arguments (the optimizer is the first), and the other arguments."""
    if len(args) > 1:
        return args[1], (args[0], *args[2:]), kwargs
    others = dict(kwargs)
    return others.pop("closure", None), args, others


@compat.opaque
def _attach(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step, register hooks on optimizers of streamed parameters, after the
    user's own hooks."""
    del args, kwargs
    if optimizer in _ATTACHED:
        compat.put_last(_ATTACHED[optimizer].handle)  # after hooks registered in the meantime
        return
    if not _LIVE or not compat.takes_hooks(optimizer):  # its inner optimizer steps next
        return
    if any(_is_over(optimizer, model.owns) for model in _LIVE):
        _hooks_on(optimizer)


def _hooks_on(optimizer: Optimizer) -> _Hooks:
    """The hooks on an optimizer, registered at the first call."""
    if optimizer not in _ATTACHED:
        hooks = _Hooks()
        hooks.handle = optimizer.register_step_pre_hook(hooks.before)
        handle = optimizer.register_step_post_hook(hooks.after)
        # before the user's hooks, which may read or zero the gradients
        compat.put_first(handle)
        saves = optimizer.register_state_dict_pre_hook(_before_state_dict)
        loads = optimizer.register_load_state_dict_pre_hook(_before_load)
        hooks.handles += [hooks.handle, handle, saves, loads]
        _ATTACHED[optimizer] = hooks
    return _ATTACHED[optimizer]


_LIVE: WeakIdSet[Model] = WeakIdSet()
_ATTACHED: weakref.WeakKeyDictionary[Optimizer, _Hooks] = weakref.WeakKeyDictionary()
register_optimizer_step_pre_hook(_attach)
