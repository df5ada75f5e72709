"""Hooks on stock optimizers that notify megacompiled models of `optimizer.step()`.

    before   (after the user's pre-hooks) every model prepares its part and hides its gradients;
             torch.optim steps for the remaining parameters, whose gradients are then hidden too
    torch.optim's own step, which sees no gradients
    after    (before the user's post-hooks) every part is started, and the gradients are restored

Preparing updates no parameter. So a step that raises (in a hook, a closure, a model that refuses,
or torch.optim on other parameters) has updated no streamed parameter, counted nothing and kept the
gradients. Updates already made by a backward (`optimizer=`) are counted when the step is prepared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, filterfalse
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megacompile import compat
from megacompile.garbage import every_object
from megacompile.runtime.device.background import WeakIdSet
from megacompile.runtime.optim.blockwise import to_plain
from megacompile.runtime.optim.rules import known
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.optimizer_states import drop_empty, reserve
from megacompile.runtime.updates.update import BucketUpdate


@dataclass(eq=False, slots=True)
class PreparedStep:
    """One model's part of an `optimizer.step()`, from its preparation to its start."""

    optimizer: Optimizer
    parts: list[BucketUpdate]
    params: Sequence[nn.Parameter]  # the parameters that it updates
    gradients: list[Any]
    # their future states; empty if the optimizer's states stay as they are
    states: Sequence[dict[str, Any]] = ()
    counters: list[torch.Tensor] = field(default_factory=list)  # counters in these states


def optimizers_of(model: Any) -> list[Optimizer]:
    """The optimizers that have stepped over parameters of a model."""
    return [optimizer for optimizer in list(_ATTACHED) if _is_over(optimizer, model.owns)]


def constructed(owns: Callable[[torch.Tensor], bool]) -> list[Optimizer]:
    """The optimizers over parameters of a model, even before their first step: all live objects are
    searched, in tens of milliseconds, without a Python loop."""
    everything, todo, kinds = every_object(), list[type]((Optimizer,)), set[type]()
    while todo:
        kinds.add(kind := todo.pop())
        todo += type.__subclasses__(kind)
    found = compress(everything, map(kinds.__contains__, map(type, everything)))
    return [optimizer for optimizer in found if _is_over(optimizer, owns)]


def leave(model: Any, optimizers: Iterable[Optimizer]) -> None:
    """Stop notifying a model and remove the hooks from its optimizers, but for those with
    parameters of another model."""
    MODELS.discard(model)
    for optimizer in optimizers:
        if optimizer in _ATTACHED and not _models_of(optimizer):
            for handle in _ATTACHED.pop(optimizer).handles:
                handle.remove()


def _is_over(optimizer: Optimizer, owns: Callable[[torch.Tensor], bool]) -> bool:
    groups = getattr(optimizer, "param_groups", ())  # or a wrapper
    return any(owns(p) for group in groups for p in group["params"])


def _models_of(optimizer: Optimizer) -> list[Any]:
    return [model for model in MODELS if _is_over(optimizer, model.owns)]


class _Hooks:
    def __init__(self) -> None:
        self.parts: list[tuple[Any, PreparedStep]] = []  # of the running step
        self.hidden: list[tuple[nn.Parameter, Any]] = []
        self.reserved: list[nn.Parameter] = []  # parameters without states at its start
        self.handles: list[Any] = []  # of all hooks, `before` first

    @compat.opaque
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare the models' parts; a closure is called first: it computes the gradients."""
        if self.hidden or self.parts or self.reserved:  # the last step was interrupted
            self._give_up(optimizer)
        if known(type(optimizer)) is not None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                args = (args[0], lambda: loss, *args[2:])
                kwargs = {name: value for name, value in kwargs.items() if name != "closure"}
        try:
            with unguarded(), compat.on_host():
                for model in MODELS:
                    part = model.prepare_step(optimizer)
                    if part is not None:
                        self.parts.append((model, part))
                has_states = False
                for _, part in self.parts:
                    self._hide(zip(part.params, part.gradients, strict=True))
                    has_states = has_states or bool(part.states)
                groups = optimizer.param_groups if self.parts else ()
                params = chain.from_iterable(map(itemgetter("params"), groups))
                left = [(param, param.grad) for param in params if param.grad is not None]
                if left or has_states:
                    trained = map(itemgetter(0), (*self.hidden, *left))
                    new = list(filterfalse(optimizer.state.__contains__, trained))
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
            if self.reserved:
                drop_empty(optimizer, self.reserved)
                self.reserved = []
            for param, gradient in self.hidden:
                if param.grad is None:
                    param.grad = gradient
            self.hidden = []
            while self.parts:
                for part in self.parts.pop()[1].parts:
                    part.drop()


def _settle(optimizer: Optimizer, *loaded: Any) -> None:
    """Wait for work in flight when an optimizer is saved, which raises if values are half updated,
    or loaded, which makes them whole."""
    for model in _models_of(optimizer):
        with unguarded():
            model.settle(raises=not loaded)


@compat.opaque
def _attach(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any step, register hooks on optimizers of streamed parameters, after the user's."""
    if optimizer in _ATTACHED:
        compat.move_hook(_ATTACHED[optimizer].handles[0], last=True)  # after newer hooks
        return
    if not MODELS or not compat.takes_hooks(optimizer):  # its inner optimizer steps next
        return
    if _models_of(optimizer):
        attach(optimizer)


def attach(optimizer: Optimizer) -> _Hooks:
    """The hooks on an optimizer, registered at the first call."""
    if optimizer not in _ATTACHED:
        hooks = _Hooks()
        first = optimizer.register_step_pre_hook(hooks.before)
        handle = optimizer.register_step_post_hook(hooks.after)
        # before the user's hooks, which may read or zero the gradients
        compat.move_hook(handle, last=False)
        saves = optimizer.register_state_dict_pre_hook(_settle)
        loads = optimizer.register_load_state_dict_pre_hook(_settle)
        # 8-bit states become float32 tensors, which a plain run can load
        plain = optimizer.register_state_dict_post_hook(lambda _, found: to_plain(found))
        hooks.handles += [first, handle, saves, loads, plain]
        _ATTACHED[optimizer] = hooks
    return _ATTACHED[optimizer]


MODELS: WeakIdSet[Any] = WeakIdSet()  # the `step.Updates` of each
_ATTACHED: weakref.WeakKeyDictionary[Optimizer, _Hooks] = weakref.WeakKeyDictionary()
register_optimizer_step_pre_hook(_attach)
