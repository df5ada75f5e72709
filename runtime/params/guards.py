"""Tensors that call their guard before they are read or written.

While an update runs in the background, a bucket's memory must not be touched. So the user's tensors
(parameters, gradients, optimizer states) have a subclass whose `__torch_function__` calls their
`Guard`. The first use waits for that bucket; then they have their plain class again.

[Note: what a guard cannot see] A plain alias (`p.detach()`, an entry of an old `state_dict()`)
shares the memory but not the guard: code that starts background work counts the users of each
storage, and waits at once if there are others. C functions that export memory are wrapped
(`compat.ask_before_export`).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megacompile import compat

unguarded = compat.without_torch_function  # a context in which this thread bypasses guards


class GuardState(enum.Enum):
    """The state of a guarded tensor, which determines the effect of its first use. Without a guard
    it is plain."""

    # a parameter, an optimizer state or a gradient (`MemoryGuard`)
    WATCHED = enum.auto()  # a use marks copies (on the device, in another dtype) as possibly stale
    OFFERED = enum.auto()  # a use withdraws the backward's result that was offered to the next step
    IN_FLIGHT = enum.auto()  # a use waits for background work that reads or writes it
    # a gradient (`gradient_guards.GradientGuard`)
    LAZY = enum.auto()  # on the host, with known norms: a use applies the recorded factor
    TAKEN = enum.auto()  # consumed by an update in the backward: a use is an error
    UNSUMMED = enum.auto()  # not summed over replicas yet: a use is an error


class Guard:
    """Guards tensors; each tensor references its guard until it is plain again."""

    __slots__ = ("state",)
    state: GuardState

    def open(self, tensor: torch.Tensor) -> None:
        """Make the tensor safe to use, and `release` it."""
        raise NotImplementedError

    @staticmethod
    def serve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function over guarded tensors, computed without reading all their data;
        `NotImplemented` to decline."""
        raise NotImplementedError


class MemoryGuard(Guard):
    """The guard of tensors in the memory of a bucket: parameters, states, gradients."""

    __slots__ = ("work",)

    def __init__(
        self,
        state: GuardState,  # WATCHED, OFFERED or IN_FLIGHT
        work: Any,  # the bucket's `Pending`
    ) -> None:
        self.state = state
        self.work = work

    def open(self, tensor: torch.Tensor) -> None:
        """Wait for the work or withdraw the offer; copies of a parameter may be stale then."""
        if self.state is GuardState.IN_FLIGHT:
            self.work.wait()
        elif self.state is GuardState.OFFERED:
            self.work.withdraw()
        if guard_of(tensor) is self or state_of(tensor) is not GuardState.IN_FLIGHT:
            release(tensor)  # otherwise another thread has started new work
        self.work.forget(tensor)

    @staticmethod
    def serve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Overwrite a torn tensor. Its guard stays, so that a save checks the other tensors."""
        who = guard_of(args[0]) if function in compat.OVERWRITING else None
        if not isinstance(who, MemoryGuard) or who.state is not GuardState.IN_FLIGHT:
            return NotImplemented
        if not who.work.is_torn():
            return NotImplemented
        for other in args[1:]:
            opened(other)
        who.work.forget(args[0])
        return function(*args, **kwargs)


class Absent:
    """Hides an attribute of the base classes."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        raise AttributeError(f"{owner} has no such attribute")


class _Guarded:
    """The shared part of the two subclasses."""

    guard: Guard
    __dlpack_c_exchange_api__ = Absent()  # exports the memory without calling Python

    @classmethod
    @compat.opaque
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with unguarded():
            if func not in compat.METADATA:
                guarded = list(_guarded_among((args, kwargs)))
                # another thread may have released some
                kinds = {type(who): None for who in map(guard_of, guarded) if who is not None}
                for kind in kinds:
                    result = kind.serve(func, args, kwargs)
                    if result is not NotImplemented:
                        return result
                for tensor in guarded:
                    opened(tensor)
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:  # nn.Parameter's own calls no guard
        with unguarded():
            return copy.deepcopy(opened(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unguarded():
            return opened(self).__reduce_ex__(protocol)


class GuardedTensor(_Guarded, torch.Tensor):
    """A `torch.Tensor` while it is guarded."""


class GuardedParameter(_Guarded, nn.Parameter):
    """An `nn.Parameter` while it is guarded."""


_CLASSES: dict[type, type] = {torch.Tensor: GuardedTensor, nn.Parameter: GuardedParameter}
_PLAIN: dict[type, type] = {guarded: plain for plain, guarded in _CLASSES.items()}


def guard_dtensors() -> None:
    """Add a guarded class for DTensors. Their Python methods (`full_tensor()`, `to_local()`) read
    the local tensor, whose guard is called."""
    dtensor: Any = compat.use_dtensor()
    if dtensor in _CLASSES:
        return

    class GuardedDTensor(_Guarded, dtensor):  # type: ignore[misc]
        """A `DTensor` while it is guarded."""

        @property
        def _local_tensor(self) -> torch.Tensor:
            if compat.torch_function_enabled():
                self.guard.open(self)
            return compat.local(self)  # type: ignore[no-any-return]

        @_local_tensor.setter
        def _local_tensor(self, part: torch.Tensor) -> None:
            compat.set_local(self, part)

    compat.convert_in_place(dtensor)
    _CLASSES[dtensor] = GuardedDTensor
    _PLAIN[GuardedDTensor] = dtensor


def unguarded_class(cls: type) -> type:
    return _PLAIN.get(cls, cls)


def guard(tensors: Iterable[torch.Tensor], by: Guard) -> None:
    """Guard these tensors with `by`; tensors of unsupported subclasses stay unguarded."""
    for tensor in tensors:
        cls = type(tensor)
        if cls not in _PLAIN and cls not in _CLASSES:
            if not issubclass(cls, nn.Parameter) or compat.is_wrapper_class(cls):
                continue
            content = {"__module__": cls.__module__}
            _CLASSES[cls] = type(f"Guarded{cls.__name__}", (_Guarded, cls), content)
            _PLAIN[_CLASSES[cls]] = cls
        tensor.guard = by  # type: ignore[attr-defined]
        if cls not in _PLAIN:
            tensor.__class__ = _CLASSES[cls]


def release(tensor: torch.Tensor) -> None:
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        del tensor.guard  # type: ignore[attr-defined]


def release_from(by: Guard, tensors: Iterable[torch.Tensor]) -> None:
    """Remove a guard from these tensors, if it still guards them."""
    for tensor in tensors:
        plain = _PLAIN.get(type(tensor))
        if plain is not None and tensor.guard is by:  # type: ignore[attr-defined]
            tensor.__class__ = plain
            del tensor.guard  # type: ignore[attr-defined]


def opened(tensor: Any) -> Any:
    """Return the tensor after calling its guard, if any, like any other use."""
    if isinstance(tensor, _Guarded):
        assert isinstance(tensor, torch.Tensor)
        with unguarded():
            tensor.guard.open(tensor)
    return tensor


def guard_of(tensor: torch.Tensor | None) -> Guard | None:
    return tensor.guard if isinstance(tensor, _Guarded) else None


def state_of(tensor: torch.Tensor | None) -> GuardState | None:
    """The state of a tensor; None for a plain tensor."""
    return tensor.guard.state if isinstance(tensor, _Guarded) else None


def any_shared(tensors: Sequence[torch.Tensor]) -> bool:
    """True if the memory of one of these states or gradients has a user besides the bucket's tensor
    and the user's own (in `optimizer.state`, or `p.grad`)."""
    storages = map(torch.Tensor.untyped_storage, compat.locals_of(tensors))
    return max(compat.storage_uses(storages), default=0) > 3  # with the storage object itself


def _guarded_among(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, _Guarded):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from _guarded_among(value)


compat.take_as_plain(GuardedTensor)
compat.ask_before_collectives(opened)
