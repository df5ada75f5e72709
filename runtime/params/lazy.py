"""`p.grad` while it can answer for its norm, and be scaled, without a pass over its memory.

An L2 norm over gradients on the host takes longer than the update itself, but each gradient has
been on the device, where its norm costs nothing. So `p.grad` is guarded (see `guards`) by a
`HostGradient`, which answers `torch.linalg.vector_norm` and `torch._foreach_norm` with the norm
that was taken there, and notes a factor instead of multiplying: stock `clip_grad_norm_` and
`get_total_norm` need nothing else. The optimizer takes the factor along. Any other use multiplies
first, and from then on `p.grad` is a plain tensor.

Gradients that stay on the device note a factor too: see `lazy_on_device`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megacompile import compat
from megacompile.errors import BackwardError
from megacompile.runtime.params.guards import guard, guard_of, release


class LazyGradient:
    """Guards one `p.grad` that notes a factor.

    Args:
        tensor: it.
        settle: waits until nothing in the background reads it.
    """

    def __init__(self, tensor: torch.Tensor, settle: Callable[[], None], name: str) -> None:
        self.settle = settle
        self.name = name
        self.version = compat.version(tensor)
        guard(tensor, self)

    def noted(self) -> float | torch.Tensor | None:
        """The factor that the tensor is still to be multiplied by; None: it is what it looks
        like."""
        raise NotImplementedError

    def forget(self) -> None:
        """Nothing is noted any more."""
        raise NotImplementedError

    def open(self, tensor: torch.Tensor) -> None:
        """Multiply by what was noted, and let the tensor be plain."""
        self.settle()
        release(tensor)
        self.check(tensor)
        factor = self.noted()
        self.forget()
        if factor is not None:
            with torch.no_grad():
                tensor.mul_(factor)

    def check(self, tensor: torch.Tensor) -> None:
        """Raise if something changed a scaled gradient without asking: autograd, in C++."""
        if self.noted() is not None and compat.version(tensor) != self.version:
            raise BackwardError(
                f"the gradient of {self.name!r} was scaled (clip_grad_norm_), and then a backward "
                "outside of the model added to it; call that backward before you clip"
            )

    def serve(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Norms and factors."""
        raise NotImplementedError


class HostGradient(LazyGradient):
    """Guards a `p.grad` in host memory.

    Args:
        tensor: it.
        settle: as of `LazyGradient`.
        norms: returns its L2 norm and its largest absolute value; None where they were not taken.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        settle: Callable[[], None],
        norms: Callable[[], tuple[float, float]] | None,
        name: str,
    ) -> None:
        self.norms = norms
        self.scale = 1.0
        super().__init__(tensor, settle, name)

    def noted(self) -> float | None:
        return None if self.scale == 1.0 else self.scale

    def forget(self) -> None:
        self.scale = 1.0

    def serve(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        served = _FUNCTIONS.get(function)
        return NotImplemented if served is None else served(args, kwargs)

    def norm(self, tensor: torch.Tensor, order: float) -> torch.Tensor | None:
        """The norm of the tensor now, 0-d on the host and of its dtype, as torch returns it; None
        if it is not known.

        One of another dtype would make the factor of all gradients float32, and torch multiplies
        bf16 gradients by that one kernel a tensor, five times slower than all of them at once.
        """
        if self.norms is None or compat.version(tensor) != self.version:
            return None
        norm = self.norms()[0 if order == 2 else 1] * abs(self.scale)
        return torch.tensor(norm, dtype=tensor.dtype)


def lazy_of(tensor: torch.Tensor | None) -> LazyGradient | None:
    """The guard of a lazy gradient; None for a plain one."""
    found = guard_of(tensor)
    return found if isinstance(found, LazyGradient) else None


def _host(tensor: torch.Tensor) -> HostGradient | None:
    found = guard_of(tensor)
    return found if isinstance(found, HostGradient) else None


def _norms(tensors: Sequence[Any], order: Any) -> list[torch.Tensor] | None:
    if isinstance(order, bool) or order not in (2, math.inf):
        return None
    guards = [_host(tensor) for tensor in tensors]
    norms = [
        None if who is None else who.norm(tensor, order)
        for who, tensor in zip(guards, tensors, strict=True)
    ]
    return None if None in norms else norms  # type: ignore[return-value]


def _vector_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) == 2 else kwargs.get("ord", 2)
    if len(args) > 2 or kwargs.keys() - {"ord"}:
        return NotImplemented
    norms = _norms(args[:1], order)
    return NotImplemented if norms is None else norms[0]


def _foreach_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) == 2 else kwargs.get("ord", 2)
    if len(args) > 2 or kwargs.keys() - {"ord"}:
        return NotImplemented
    norms = _norms(args[0], order)
    return NotImplemented if norms is None else norms


def _scale(tensors: Sequence[Any], factor: Any) -> bool:
    """Note a factor for all of `tensors`, or for none."""
    if isinstance(factor, torch.Tensor):
        if factor.dim() != 0 or factor.is_complex() or factor.requires_grad:
            return False
    elif not isinstance(factor, (int, float)):
        return False
    guards = [_host(tensor) for tensor in tensors]
    if not all(
        who is not None and tensor.is_floating_point() and compat.version(tensor) == who.version
        for who, tensor in zip(guards, tensors, strict=True)
    ):
        return False
    value = float(factor)
    for who in guards:
        assert who is not None
        who.settle()  # an update that runs takes the factor that there was
        who.scale *= value
    return True


def _mul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or not _scale(args[:1], args[1]):
        return NotImplemented
    return args[0]


def _foreach_mul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or isinstance(args[1], (list, tuple)):
        return NotImplemented
    return None if _scale(args[0], args[1]) else NotImplemented


_FUNCTIONS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    compat.FOREACH_NORM: _foreach_norm,
    torch.Tensor.mul_: _mul,
    compat.FOREACH_MUL: _foreach_mul,
}
