"""The guards of a bucket's tensors (see `guards`): what a bucket does before one is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megacompile.runtime.params.guards import release


class Guarding(Protocol):
    """A bucket, as its guards see it."""

    def settle(self) -> None:
        """Wait for what is in flight."""

    def withdraw(self) -> None:
        """Take back what is offered to the next step."""

    def forget(self, index: int) -> None:
        """The streamed copy of a parameter may be stale."""


@dataclass(frozen=True, slots=True)
class _OfBucket:
    """Guards a tensor of a bucket; the bucket does `before` when somebody uses it."""

    bucket: Guarding
    param: int | None  # its index, where it is a parameter

    def before(self) -> None:
        """Make the tensor safe to use."""

    def open(self, tensor: torch.Tensor) -> None:
        self.before()
        release(tensor)
        if self.param is not None:
            self.bucket.forget(self.param)

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        del function, args, kwargs
        return NotImplemented


class Wait(_OfBucket):
    """Guards a tensor in whose memory something is in flight."""

    def before(self) -> None:
        self.bucket.settle()


class Offered(_OfBucket):
    """Guards a tensor that something offered was made from."""

    def before(self) -> None:
        self.bucket.withdraw()


class Watch(_OfBucket):
    """Guards a parameter whose streamed copy must follow it."""
