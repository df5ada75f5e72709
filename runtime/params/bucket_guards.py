"""The guards of a bucket's tensors (see `guards`): what is done before one is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megacompile import compat
from megacompile.runtime.params.guards import guard_of, release


class Copy(Protocol):
    """The streamed values of a bucket, as the guards of its parameters see them."""

    def forget(self, index: int) -> None:
        """The streamed copy of a parameter may be stale."""


class GuardedWork(Copy, Protocol):
    """The work on a bucket, as its guards see it."""

    def settle(self) -> None:
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
        self.copy.settle()

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
