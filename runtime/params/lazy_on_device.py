"""`p.grad` of a bucket that lives on the device, while it can be scaled without a pass over it.

`clip_grad_norm_` multiplies all gradients by one factor: 4 bytes of a bf16 gradient through device
memory, next to the 22 that the update moves. So `p.grad` is guarded (see `guards`) by a
`DeviceGradient`, which notes that factor. The update reads the gradient anyway: it multiplies, and
rounds as `mul_` does, so the numbers are the same in every bit (`Update.factor`). Norms are those
that torch takes of the tensors as they are. Any other use multiplies first.

The factor stays on the device: a reader of it would wait for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megacompile import compat
from megacompile.runtime.params.guards import guard_of
from megacompile.runtime.params.lazy import LazyGradient


class DeviceGradient(LazyGradient):
    """Guards a `p.grad` on the device."""

    def __init__(self, tensor: torch.Tensor, settle: Callable[[], None], name: str) -> None:
        self.factor: torch.Tensor | None = None  # 0-d, of the tensor's dtype, on its device
        super().__init__(tensor, settle, name)

    def noted(self) -> torch.Tensor | None:
        return self.factor

    def forget(self) -> None:
        self.factor = None

    def serve(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        served = _FUNCTIONS.get(function)
        return NotImplemented if served is None else served(function, args, kwargs)

    def takes(self, tensor: torch.Tensor, factor: torch.Tensor) -> bool:
        """Can this be noted? One of another dtype is rounded in a way of its own."""
        return (
            self.factor is None
            and factor.dtype is tensor.dtype
            and factor.device == tensor.device
            and tensor.is_floating_point()
        )

    def note(self, tensor: torch.Tensor, factor: torch.Tensor) -> None:
        """Multiply by `factor` later."""
        self.settle()
        self.factor, self.version = factor, compat.version(tensor)


def _guards(tensors: Sequence[Any]) -> list[DeviceGradient | None] | None:
    """The guard of each of these; None: another object guards one."""
    found: list[DeviceGradient | None] = []
    for who in map(guard_of, tensors):
        if who is not None and not isinstance(who, DeviceGradient):
            return None
        found.append(who)
    return found


def _norm(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    guards = _guards(tensors)
    if "out" in kwargs or guards is None:
        return NotImplemented
    for tensor, who in zip(tensors, guards, strict=True):
        if who is not None and who.factor is not None:
            who.open(tensor)
    return function(*args, **kwargs)


def _multiply(tensors: Sequence[Any], factor: Any) -> bool:
    """Note a factor where that can be, and multiply the others; False: it must be done elsewhere.

    The factor that is noted is a copy, because its owner may change it.
    """
    if type(factor) is not torch.Tensor or factor.dim() or factor.requires_grad:
        return False
    guards = _guards(tensors)
    if guards is None:
        return False
    own, others = factor.clone(), []
    for tensor, who in zip(tensors, guards, strict=True):
        if who is not None and who.takes(tensor, factor):
            who.note(tensor, own)
            continue
        if who is not None:
            who.open(tensor)
        others.append(tensor)
    if others:
        compat.FOREACH_MUL(others, factor)
    return True


def _mul(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del function
    if len(args) != 2 or kwargs or not _multiply(args[:1], args[1]):
        return NotImplemented
    return args[0]


def _foreach_mul(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del function
    if len(args) != 2 or kwargs or not _multiply(args[0], args[1]):
        return NotImplemented
    return None


_FUNCTIONS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.linalg.vector_norm: _norm,
    compat.FOREACH_NORM: _norm,
    torch.Tensor.mul_: _mul,
    compat.FOREACH_MUL: _foreach_mul,
}
