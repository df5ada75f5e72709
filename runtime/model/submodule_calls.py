"""Calls of a model's submodules, outside of a call of the model itself.

A `training_step` calls `self.net(x)`, a loss calls `model.head(hidden)`. So a `ModuleCall` replaces
the call of every submodule with parameters. It does the same as a call of the model: it swaps
parameters and schedules the captured graphs. While such a call runs, the replacements are removed,
and Dynamo captures the modules as they are.

Some calls stay as they are: calls in `torch.func`, under a tracer, and in a backward. There a
checkpoint repeats the forward, so a module that was never called on its own was part of a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from megacompile import compat
from megacompile.runtime.model.methods import State
from megacompile.runtime.params.undo import Undos, exchange, replace


class Caller(Protocol):
    """The model that the modules belong to."""

    def call_part(self, part: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module as the model itself is called."""


class ModuleCall:
    """Replaces a module's call. A copied or loaded module has none."""

    def __init__(self, module: nn.Module, caller: weakref.ref[Caller]) -> None:
        self.module = module
        self.caller = caller
        self.compiled: dict[State, Callable[..., Any]] = {}  # made at the first call

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None: a copied module has no `ModuleCall`, even if its class copies its own
        `__dict__`."""
        return type(None), ()

    @property
    def is_alive(self) -> bool:
        """True if its model is alive."""
        return self.caller() is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = self.caller()
        if caller is None or self._stays_plain():
            return getattr(self.module, compat.CALL)(*args, **kwargs)
        return caller.call_part(self, args, kwargs)

    def _stays_plain(self) -> bool:
        if compat.tracer_around():
            return True
        if compat.in_transform() and not compat.given_to_functional_call():
            return True
        return not self.compiled and compat.backward_id() != -1


class ModuleCalls:
    """The submodule calls of a model.

    Args:
        model: the model that contains the modules.
        caller: runs their calls.
    """

    def __init__(self, model: nn.Module, caller: Caller) -> None:
        self.model = model
        self.caller = weakref.ref(caller)
        self._columns: tuple[list[Any], ...] = ([], [], [], [])
        self.put_in()

    def put_in(self) -> None:
        """Replace the call of each module, including new modules."""
        found: list[tuple[dict[str, Any], ModuleCall]] = []
        for module in _eligible(self.model):
            present = compat.compiled_call(module)
            if isinstance(present, ModuleCall) and present.caller is self.caller:
                part = present
            elif present is None or (isinstance(present, ModuleCall) and not present.is_alive):
                part = ModuleCall(module, self.caller)
                compat.set_compiled_call(module, part)
            else:
                continue
            found.append((vars(module), part))
        self._columns = (
            [holder for holder, _ in found],
            [compat.COMPILED_CALL] * len(found),
            [part for _, part in found],
            [None] * len(found),
        )

    def take_out(self, undos: Undos) -> None:
        """Restore the modules' plain calls until the undos run."""
        holders, names, parts, none = self._columns
        replace(holders, names, parts, none, undos)

    def end(self) -> None:
        """Restores the modules."""
        holders, names, parts, none = self._columns
        exchange(holders, names, parts, none)
        for holder, part in zip(holders, parts, strict=True):
            if not part.compiled or holder.get(compat.COMPILED_CALL) is None:
                holder.pop(compat.COMPILED_CALL, None)
        self._columns = ([], [], [], [])


def is_part(call: Callable[..., Any] | None) -> bool:
    """True if it replaces a module's call because a model around the module is megacompiled."""
    return isinstance(call, ModuleCall)


def _eligible(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose calls are replaced: those with parameters.

    Excludes modules that compute a parameter on access, and modules that call another module to
    observe it.
    """
    computed = {
        id(inner)
        for module in model.modules()
        if isinstance(module, ParametrizationList)
        for inner in module.modules()
    }
    for module in model.modules():
        if module is model or id(module) in computed:
            continue
        if isinstance(module, (torch.jit.ScriptModule, DistributedDataParallel)):
            continue
        if next(module.parameters(), None) is not None:
            yield module
