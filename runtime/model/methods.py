"""The methods that replace those of a streamed model, and the calls of its submodules."""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList

from megacompile import compat, notices
from megacompile.errors import ModelError
from megacompile.runtime.model import loops
from megacompile.runtime.params.swap import exchange, undone


class Replacement:
    """Replaces a model's method. Copies and pickles of the model omit it; if a class copies its own
    `__dict__`, the copy gets its class's method."""

    name: str

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> MethodType:
        return MethodType(getattr(type(self.model), self.name), copy.deepcopy(self.model, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, self.name)

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the model's class."""
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)


class OwnCall(Replacement):
    """Calls the stock method. Dynamo would capture that one in a caller, and bypass streaming."""

    name = compat.CALL
    __call__ = compat.within_callers(Replacement.stock)


class OwnCompile(Replacement):
    """Does nothing: `torch.compile` would replace streaming."""

    name = "compile"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
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
        kinds = {(p.dtype, p.device) for p in self.model.parameters()}
        moved = False

        def only_moves(dtype: torch.dtype, device: torch.device) -> bool:
            probe = function(torch.empty(0, dtype=dtype, device=device))
            return bool(probe.dtype == dtype and probe.device != device)

        def stay(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal moved
            probe = function(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if id(tensor) not in params or probe.device == tensor.device:
                result: torch.Tensor = function(tensor)
                return result
            moved = True
            return tensor if probe.dtype == tensor.dtype else tensor.to(probe.dtype)

        stays = all(only_moves(*kind) for kind in kinds)
        with compat.parameters_stay() if stays else nullcontext():
            applied: nn.Module = self.stock(stay, recurse)
        if moved:
            notices.warn_once(
                "to(device)",
                "megacompile: parameters stay in host memory and are streamed to the device; "
                "model.to(device) moved only buffers (shown once)",
                of=self,
            )
        return applied


class SharedSave(Replacement):
    """Raises if nothing was gathered: loops call it in their first rank, which has its rows."""

    name = "save_pretrained"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is not None or loops.is_saved(self.model):  # already gathered
            return self.stock(*args, **kwargs)
        raise ModelError(
            f"save_pretrained(): ranks share {type(self.model).__name__} (mesh=), and this one has "
            "only its rows; call megacompile.save(model, folder) in all ranks (with Trainer: "
            "trainer.save_model(folder); with Accelerate: accelerator.save_model(model, folder), "
            "or state_dict=accelerator.get_state_dict(model))"
        )


def replace_methods(model: nn.Module, *, shared: bool = False) -> None:
    """Replace a model's methods; `shared`: of one that ranks share. Its copies are plain."""
    for kind in (HostApply, OwnCall, OwnCompile):
        setattr(model, kind.name, kind(model))
    if shared and hasattr(model, SharedSave.name):
        setattr(model, SharedSave.name, SharedSave(model))


def restore_methods(model: nn.Module) -> None:
    """Undo `replace_methods`."""
    for kind in (HostApply, OwnCall, OwnCompile):
        if isinstance(vars(model).get(kind.name), kind):
            delattr(model, kind.name)


State = frozenset[tuple[type, int]]  # classes whose methods were replaced, and the replacements


class ClassMethods:
    """The methods of the classes of a streamed model's modules, past and current. Dynamo guards a
    module's attributes in each call, but not the functions of its class: a capture is valid only
    for the functions at the time of capture."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._had: dict[type, list[dict[str, Any]]] = {}  # every set of methods of a class
        self._now: dict[type, tuple[tuple[Any, ...], int]] = {}  # its attributes, the set's index
        self.find()

    def find(self) -> None:
        """Look for new classes."""
        for kind in {type(module) for module in compat.modules_of(self._model)}:
            for cls in kind.__mro__:
                if cls not in self._had and cls not in (nn.Module, object):
                    self._had[cls] = []
        self.state()

    def state(self) -> State:
        """A key that is equal if all classes have the same methods."""
        found = set()
        for cls in self._had:
            values = tuple(vars(cls).values())
            known, index = self._now.get(cls, ((), 0))
            if len(values) != len(known) or not all(map(operator.is_, values, known)):
                index = self._index(cls)
                self._now[cls] = values, index
            if index:
                found.add((cls, index))
        return frozenset(found)

    def _index(self, cls: type) -> int:
        """The number of different sets of methods before the current one first appeared."""
        methods = {
            name: value
            for name, value in vars(cls).items()
            if callable(value) or hasattr(type(value), "__get__")
        }
        for k, had in enumerate(self._had[cls]):
            if had.keys() == methods.keys() and all(had[n] is methods[n] for n in had):
                return k
        self._had[cls].append(methods)
        return len(self._had[cls]) - 1


class ModuleCall:
    """Replaces the call of a submodule outside of a call of the model: a `training_step` calls
    `self.net(x)`, a loss calls `model.head(hidden)`. It does the same as a call of the model.

    Some calls stay as they are: calls in `torch.func`, under a tracer, and in a backward. There a
    checkpoint repeats the forward, so a module that was never called on its own was part of a call.
    A copied or loaded module has no `ModuleCall`. `streamed` refers to a `StreamedModel`.
    """

    def __init__(self, module: nn.Module, streamed: weakref.ref[Any]) -> None:
        self.module = module
        self.streamed = streamed
        self.compiled: dict[State, Callable[..., Any]] = {}  # made at the first call

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None: a copied module has none, even if its class copies its own `__dict__`."""
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        streamed = self.streamed()
        if (
            streamed is None
            or compat.tracer_around()
            or (compat.in_transform() and not compat.given_to_functional_call())
            or (not self.compiled and compat.backward_id() != -1)
        ):
            return getattr(self.module, compat.CALL)(*args, **kwargs)
        return undone(partial(streamed.call_module, self.module, self.compiled, args, kwargs))


class ModuleCalls:
    """The submodule calls of a streamed model."""

    def __init__(self, model: nn.Module, streamed: Any) -> None:
        self.model = model
        self.streamed = weakref.ref(streamed)
        self.put_in()

    def put_in(self) -> None:
        """Replace the call of each module, including new modules."""
        parts = []
        for module in _eligible(self.model):
            part = compat.compiled_call(module)
            if part is None or (isinstance(part, ModuleCall) and part.streamed() is None):
                part = ModuleCall(module, self.streamed)
                compat.set_compiled_call(module, part)
            if isinstance(part, ModuleCall) and part.streamed is self.streamed:
                parts.append(part)
        holders, count = [vars(part.module) for part in parts], len(parts)
        # for `exchange`: puts the modules' plain calls in
        self.columns = holders, [compat.COMPILED_CALL] * count, parts, [None] * count

    def end(self) -> None:
        """Restore the modules."""
        exchange(*self.columns)
        holders, _, parts, _ = self.columns
        for holder, part in zip(holders, parts, strict=True):
            if not part.compiled or holder.get(compat.COMPILED_CALL) is None:
                holder.pop(compat.COMPILED_CALL, None)


def _eligible(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose calls are replaced: those with parameters, but for modules that compute a
    parameter on access, and modules that call another module to observe it."""
    lists = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    others = {id(model), *(id(inner) for each in lists for inner in each.modules())}
    for module in model.modules():
        observes = isinstance(module, (torch.jit.ScriptModule, DistributedDataParallel))
        if id(module) not in others and not observes:
            if next(module.parameters(), None) is not None:
                yield module
