"""The methods that replace those of a streamed model."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megacompile import compat, notices
from megacompile.errors import ModelError
from megacompile.runtime.model import loops
from megacompile.runtime.model.whole_states import is_saved


class Replacement:
    """Replaces a model's method. Copies and pickles of the model omit it; if a class copies its own
    `__dict__`, the copy gets its class's method."""

    name: str

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainMethod:
        return PlainMethod(copy.deepcopy(self.model, memo), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, self.name)


class PlainMethod(Replacement):
    """Return the copy's method."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(model)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class OwnCall(Replacement):
    """Calls the stock method. If Dynamo found that method itself while it captures a caller of the
    model, it would capture the model's `forward` and bypass streaming."""

    name = compat.CALL

    @compat.within_callers
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class OwnCompile(Replacement):
    """Does nothing: `torch.compile` would replace streaming."""

    name = "compile"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        notices.warn_once(
            "compile()",
            f"megacompile: {type(self.model).__name__}.compile() does nothing: megacompile "
            "compiles the model (shown once); leave it out",
            of=self,
        )


class HostApply(Replacement):
    """`model.to(device)` leaves the parameters where they are. Dtype changes are applied."""

    name = compat.APPLY

    def __call__(self, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        loops.take_over()
        params = {id(p) for p in self.model.parameters()}
        moved = False

        def stay(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal moved
            probe = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if id(tensor) not in params or probe.device == tensor.device:
                result: torch.Tensor = function(tensor)
                return result
            moved = True
            return tensor if probe.dtype == tensor.dtype else tensor.to(probe.dtype)

        applied: nn.Module = getattr(type(self.model), self.name)(self.model, stay, recurse)
        if moved:
            notices.warn_once(
                "to(device)",
                "megacompile: parameters stay in host memory and are streamed to the device; "
                "model.to(device) moved only buffers (shown once)",
                of=self,
            )
        return applied


class SharedSave(Replacement):
    """Raises if nothing was gathered: loops call it in their first rank, which has only its own
    rows."""

    name = "save_pretrained"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None or is_saved(self.model):  # already gathered
            return getattr(type(self.model), self.name)(self.model, *args, **kwargs)
        raise ModelError(
            f"save_pretrained(): ranks share {type(self.model).__name__} (mesh=), and this one has "
            "only its rows; call megacompile.save(model, folder) in all ranks (with Trainer: "
            "trainer.save_model(folder); with Accelerate: accelerator.save_model(model, folder), "
            "or state_dict=accelerator.get_state_dict(model))"
        )


def replace_methods(model: nn.Module, *, shared: bool = False) -> None:
    """Replace a model's methods; a copied or loaded model is a plain one.

    Args:
        shared: ranks share the model.
    """
    for kind in (HostApply, OwnCall, OwnCompile):
        setattr(model, kind.name, kind(model))
    if shared and hasattr(model, SharedSave.name):
        setattr(model, SharedSave.name, SharedSave(model))


def restore_methods(model: nn.Module) -> None:
    """Restore a model's methods."""
    for kind in (HostApply, OwnCall, OwnCompile, SharedSave):
        if isinstance(vars(model).get(kind.name), kind):
            delattr(model, kind.name)


# The methods of a model's classes, which Dynamo does not guard once it has captured a module.
# Dynamo guards a module's attributes in each call, but not the functions of its class. So a capture
# is valid only for the functions at the time of capture.

State = frozenset[tuple[type, int]]  # classes whose methods were replaced, and the replacements


class ClassMethods:
    """The methods of the classes of a streamed model's modules, past and current.

    Args:
        model: covers its current and future modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._classes: dict[type, _Methods] = {}
        self.find()

    def find(self) -> None:
        """Look for new classes."""
        for kind in {type(module) for module in compat.modules_of(self._model)}:
            for cls in kind.__mro__:
                if cls not in self._classes and cls not in (nn.Module, object):
                    self._classes[cls] = _Methods(cls)

    def state(self) -> State:
        """A key that is equal if all classes have the same methods."""
        return frozenset(
            (cls, state) for cls, methods in self._classes.items() if (state := methods.state())
        )


class _Methods:
    """The methods of one class: all past sets, and the current one."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._values: tuple[Any, ...] = ()
        self._had: list[dict[str, Any]] = []
        self._now = 0
        self.state()

    def state(self) -> int:
        """The number of different sets before the current one first appeared."""
        values = tuple(vars(self.cls).values())
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._values = values
            self._now = self._position(
                {name: value for name, value in vars(self.cls).items() if _is_method(value)}
            )
        return self._now

    def _position(self, methods: dict[str, Any]) -> int:
        for k, had in enumerate(self._had):
            if had.keys() == methods.keys() and all(had[n] is methods[n] for n in had):
                return k
        self._had.append(methods)
        return len(self._had) - 1


def _is_method(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")
