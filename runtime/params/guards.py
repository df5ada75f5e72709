"""Tensors that ask their guard before they are read or written.

While an update runs in the background, the memory of a bucket must not be touched: reading a
parameter would give half of the old value and half of the new one. So for that time the tensors
that a user can hold (parameters, gradients, optimizer states) are of a subclass whose
`__torch_function__` asks their `Guard` first. The first use waits for that bucket, and no more;
from then on they are again what they were: `torch.Tensor` or `nn.Parameter`, without overhead.

[Note: what a guard cannot see] A plain alias (`p.detach()`, an entry of an old `state_dict()`)
shares the memory but not the guard. Code that starts work in the background counts the users of
each storage first (`compat.storage_users`) and waits at once where there are more than its own.
Functions in C that take a tensor without `__torch_function__` do not ask either: those that export
its memory to other libraries are wrapped (`compat.ask_before_export`).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from megacompile import compat


class GuardState(enum.Enum):
    """The state of a guarded tensor, and what its first use does. Without a guard it is plain.

    Of a parameter, an optimizer state or a gradient (`pending.MemoryGuard`):

        WATCHED    copies of the parameter (on the device, in another dtype) may be stale from then
        OFFERED    the next step was offered what the backward made of it: that is withdrawn
        IN_FLIGHT  work in the background reads or writes it: that is waited for

    Of a gradient (`gradient_guards.GradientGuard`):

        LAZY       on the host, its norms known: it is multiplied by the factor that was noted
        FOLDED     the same on the device, without norms
        TAKEN      an update in the backward has used it up: an error
        UNSUMMED   its sum over replicas is to come: an error
    """

    WATCHED = enum.auto()
    OFFERED = enum.auto()
    IN_FLIGHT = enum.auto()
    LAZY = enum.auto()
    FOLDED = enum.auto()
    TAKEN = enum.auto()
    UNSUMMED = enum.auto()


class Guard:
    """The guard of tensors, each of which has it until it is plain again."""

    __slots__ = ("state",)

    def __init__(self, state: GuardState) -> None:
        self.state = state

    def open(self, tensor: torch.Tensor) -> None:
        """Make the tensor safe to use, and `release` it."""
        raise NotImplementedError

    @staticmethod
    def serve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function over tensors with such guards, without a look at the data of
        all of them; `NotImplemented` to decline."""
        raise NotImplementedError


class Absent:
    """An attribute that a class does not have, though its bases do."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError(f"{owner} has no such attribute")


class _Guarded:
    """The shared part of the two subclasses."""

    guard: Guard
    __dlpack_c_exchange_api__ = Absent()  # which exports the memory without a call of Python

    @classmethod
    @compat.opaque
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with unguarded():
            if func not in compat.METADATA:
                guarded = list(_guarded_among((args, kwargs)))
                for guards in _kinds(guarded):
                    result = guards.serve(func, args, kwargs)
                    if result is not NotImplemented:
                        return result
                for tensor in guarded:
                    opened(tensor)
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:  # nn.Parameter's asks no guard, and copies the class
        assert isinstance(self, torch.Tensor)
        with unguarded():
            self.guard.open(self)
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        assert isinstance(self, torch.Tensor)
        with unguarded():
            self.guard.open(self)
            return self.__reduce_ex__(protocol)


class GuardedTensor(_Guarded, torch.Tensor):
    """A `torch.Tensor` while it is guarded."""


class GuardedParameter(_Guarded, nn.Parameter):
    """An `nn.Parameter` while it is guarded."""


_CLASSES: dict[type, type] = {torch.Tensor: GuardedTensor, nn.Parameter: GuardedParameter}
_PLAIN: dict[type, type] = {guarded: plain for plain, guarded in _CLASSES.items()}


def guard_dtensors() -> None:
    """Makes DTensors guarded too. Their methods in Python (`full_tensor()`, `to_local()`) take what
    this rank has, and ask there."""
    dtensor: Any = compat.use_dtensor()
    if dtensor in _CLASSES:
        return

    class GuardedDTensor(_Guarded, dtensor):  # type: ignore[misc]
        """A `DTensor` while it is guarded."""

        @property
        def _local_tensor(self) -> torch.Tensor:
            if compat.torch_function_enabled():
                self.guard.open(self)
            found: torch.Tensor = compat.local(self)
            return found

        @_local_tensor.setter
        def _local_tensor(self, part: torch.Tensor) -> None:
            compat.set_local(self, part)

    compat.convert_in_place(dtensor)
    _CLASSES[dtensor] = GuardedDTensor
    _PLAIN[GuardedDTensor] = dtensor


def _guardable(cls: type) -> type | None:
    """The guarded class for parameters of a class of their own; None for any other class."""
    if not issubclass(cls, nn.Parameter) or compat.is_wrapper_class(cls):
        return None
    _CLASSES[cls] = type(f"Guarded{cls.__name__}", (_Guarded, cls), {"__module__": cls.__module__})
    _PLAIN[_CLASSES[cls]] = cls
    return _CLASSES[cls]


def unguarded_class(cls: type) -> type:
    """The class of a tensor when it is not guarded."""
    return _PLAIN.get(cls, cls)


def guard(tensors: Iterable[torch.Tensor], by: Guard) -> None:
    """Ask `by` before any use of these; a subclass that cannot be guarded stays as it is."""
    for tensor in tensors:
        cls = type(tensor)
        guarded = cls if cls in _PLAIN else _CLASSES.get(cls) or _guardable(cls)
        if guarded is not None:
            tensor.guard = by  # type: ignore[attr-defined]
            if guarded is not cls:
                tensor.__class__ = guarded


def release(tensor: torch.Tensor) -> None:
    """Removes the guard of a tensor."""
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        del tensor.guard  # type: ignore[attr-defined]


def release_from(by: Guard, tensors: Iterable[torch.Tensor]) -> None:
    """Removes a guard from those of these tensors that it still guards."""
    for tensor in tensors:
        plain = _PLAIN.get(type(tensor))
        if plain is not None and tensor.guard is by:  # type: ignore[attr-defined]
            tensor.__class__ = plain
            del tensor.guard  # type: ignore[attr-defined]


def opened(tensor: Any) -> Any:
    """The tensor. Its guard is asked, if it has one, as any use of it would."""
    if isinstance(tensor, _Guarded):
        assert isinstance(tensor, torch.Tensor)
        with unguarded():
            tensor.guard.open(tensor)
    return tensor


def guard_of(tensor: torch.Tensor | None) -> Guard | None:
    """The guard of a tensor now."""
    return tensor.guard if isinstance(tensor, _Guarded) else None


def state_of(tensor: torch.Tensor | None) -> GuardState | None:
    """The state of a tensor; None for one that is plain."""
    return tensor.guard.state if isinstance(tensor, _Guarded) else None


def unguarded() -> AbstractContextManager[None]:
    """For its duration, this thread uses guarded tensors without asking."""
    return compat.without_torch_function()


def _guarded_among(values: Any) -> Iterator[Any]:
    """The guarded tensors among (nested) arguments."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, _Guarded):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from _guarded_among(value)


def _kinds(guarded: Iterable[Any]) -> Iterable[type[Guard]]:
    """The classes of the guards of these, each once. A thread may have released some meanwhile."""
    return {type(who): None for who in map(guard_of, guarded) if who is not None}


compat.take_as_plain(GuardedTensor)
compat.ask_before_export(opened)
compat.ask_before_collectives(opened)
