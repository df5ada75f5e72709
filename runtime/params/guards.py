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
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from megacompile import compat


class Guard(Protocol):
    """Tensors that synchronise with background work on first access."""

    def open(self, tensor: torch.Tensor) -> None:
        """Make the tensor safe to use, and `release` it."""

    def serve(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, without a look at the data; `NotImplemented` to decline."""


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
                for tensor in _guarded_among((args, kwargs)):
                    result = tensor.guard.serve(func, args, kwargs)  # type: ignore[attr-defined]
                    if result is not NotImplemented:
                        return result
                for tensor in _guarded_among((args, kwargs)):
                    tensor.guard.open(tensor)  # type: ignore[attr-defined]
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


def _guardable(cls: type) -> None:
    """Makes parameters of a class of their own guarded too."""
    if cls not in _CLASSES and cls not in _PLAIN:
        names = {"__module__": cls.__module__}
        _CLASSES[cls] = type(f"Guarded{cls.__name__}", (_Guarded, cls), names)
        _PLAIN[_CLASSES[cls]] = cls


def unguarded_class(cls: type) -> type:
    """The class of a tensor when it is not guarded."""
    return _PLAIN.get(cls, cls)


def guard(tensor: torch.Tensor, by: Guard) -> bool:
    """Ask `by` before any use of `tensor`; False for a subclass that cannot be guarded."""
    if issubclass(type(tensor), nn.Parameter) and not compat.is_wrapper_class(type(tensor)):
        _guardable(type(tensor))
    if type(tensor) not in _CLASSES and type(tensor) not in _PLAIN:
        return False
    tensor.guard = by  # type: ignore[attr-defined]
    if type(tensor) in _CLASSES:
        tensor.__class__ = _CLASSES[type(tensor)]
    return True


def release(tensor: torch.Tensor) -> None:
    """Removes the guard of a tensor."""
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        del tensor.guard  # type: ignore[attr-defined]


def release_from(guarded: Iterable[tuple[torch.Tensor, Guard]]) -> None:
    """Release those of these tensors that the guards next to them still guard."""
    for tensor, by in guarded:
        if isinstance(tensor, _Guarded) and tensor.guard is by:
            release(tensor)


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


def unguarded() -> AbstractContextManager[None]:
    """For its duration, this thread uses guarded tensors without asking."""
    return compat.without_torch_function()


def _guarded_among(values: Any) -> Iterator[torch.Tensor]:
    """The guarded tensors among (nested) arguments."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, _Guarded):
            assert isinstance(value, torch.Tensor)
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from _guarded_among(value)


compat.take_as_plain(GuardedTensor)
compat.ask_before_export(opened)
compat.ask_before_collectives(opened)


# The guards of a bucket's tensors (see `guards`): what is done before one is used.


class Copy(Protocol):
    """The streamed values of a bucket, as the guards of its parameters see them."""

    def forget(self, index: int) -> None:
        """The streamed copy of a parameter may be stale."""


class GuardedWork(Copy, Protocol):
    """The work on a bucket, as its guards see it."""

    def wait(self) -> None:
        """Wait for what is in flight."""

    def withdraw(self) -> None:
        """Take back what is offered to the next step."""

    def is_torn(self) -> bool:
        """True if an update has left it half made."""

    def overwritten(self, tensor: torch.Tensor) -> None:
        """All of a tensor that is torn has other values."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Guards a parameter whose streamed copy must follow it."""

    copy: Copy
    param: int | None  # its index, where the tensor is a parameter

    def before(self) -> None:
        """Make the tensor safe to use."""

    def open(self, tensor: torch.Tensor) -> None:
        self.before()
        now = guard_of(tensor)
        if now is self or not isinstance(now, Wait):  # else another thread has started new work
            release(tensor)
        if self.param is not None:
            self.copy.forget(self.param)

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        del function, args, kwargs
        return NotImplemented


@dataclass(frozen=True, slots=True)
class Wait(Watch):
    """Guards a tensor in whose memory something is in flight."""

    copy: GuardedWork

    def before(self) -> None:
        self.copy.wait()

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Marks a tensor that is overwritten as whole again, where it is torn. The guard stays: a
        save asks if the others are whole."""
        mine = function in compat.OVERWRITING and guard_of(args[0]) is self
        if not mine or not self.copy.is_torn():
            return NotImplemented
        for other in args[1:]:
            who = guard_of(other) if isinstance(other, torch.Tensor) else None
            if who is not None:
                who.open(other)
        if self.param is not None:
            self.copy.forget(self.param)
        result = function(*args, **kwargs)
        self.copy.overwritten(args[0])
        return result


@dataclass(frozen=True, slots=True)
class Offered(Watch):
    """Guards a tensor that something offered was made from."""

    copy: GuardedWork

    def before(self) -> None:
        self.copy.withdraw()
