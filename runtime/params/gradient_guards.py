"""Guards of gradients: a `p.grad` that returns a precomputed norm, records a factor, or raises.

**Lazy** (on the host): an L2 norm over host gradients takes longer than the update, but is nearly
free on the device, where gradients are computed. So `vector_norm` and `_foreach_norm` return the
norm computed there, and a multiplication only records its factor, which the optimizer applies:
stock `clip_grad_norm_` needs nothing else. Any other use multiplies first.

**Taken** by an update in the backward: only the L2 norm is left, so loops that log it keep working
(`clip_grad_norm_(parameters, inf)`). A factor of 1 changes nothing. Other uses are errors.

**Unsummed** over replicas, before the last micro-batch (`Schedule.defers`): each replica's `p.grad`
is a different part of the sum. Uses are errors; the last backward adds to it and sums it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import BackwardError, OptimizerError
from megacompile.runtime.params.guards import (
    Guard,
    GuardState,
    guard,
    guard_of,
    opened,
    release,
    state_of,
)
from megacompile.runtime.params.pending import Pending


class GradientGuard(Guard):
    """Guards one `p.grad` until its first use or its replacement."""

    __slots__ = ("copied", "name", "norms", "scale", "version", "work")

    def __init__(
        self,
        tensor: torch.Tensor,
        state: GuardState,  # LAZY, TAKEN or UNSUMMED
        name: str,  # the parameter's
        # returns the L2 norm and, if computed, the largest absolute value
        norms: Callable[[], Sequence[float]] | None = None,
        *,
        work: Pending | None = None,  # of its bucket
        copied: torch.cuda.Event | None = None,  # after its copy to the host; users wait for it
    ) -> None:
        self.state = state
        self.name = name
        self.norms = norms
        self.work = work
        self.copied = copied
        self.scale = 1.0  # lazy: the factor that is not applied yet
        self.version = compat.version(tensor)
        guard([tensor], self)

    def open(self, tensor: torch.Tensor) -> None:
        """Apply the recorded factor and make the tensor plain. Raises OptimizerError: the gradient
        is consumed or not summed yet; BackwardError: autograd has added to a scaled one."""
        if self.state is GuardState.TAKEN:
            raise is_consumed(self.name)
        if self.state is GuardState.UNSUMMED:
            raise OptimizerError(
                f"p.grad of {self.name!r} is not summed over replicas yet, so it cannot be read, "
                "clipped, used by an optimizer, or added to by a backward outside of the model: "
                "its last backward ran inside of megacompile.accumulate(model), or a loop "
                "(Accelerate, Trainer) announced another one before the step; run the last "
                "micro-batch outside of accumulate(), with this parameter in it and without a hook "
                "or penalty that the others did not have, or call optimizer.zero_grad()"
            )
        self.settle()
        release(tensor)
        self.check(tensor)
        factor, self.scale = self.scale, 1.0
        if factor != 1.0:
            with torch.no_grad():
                tensor.mul_(factor)

    def settle(self) -> None:
        """Wait until no background work reads or writes it."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.work is not None:
            self.work.wait()

    def check(self, tensor: torch.Tensor) -> None:
        """Raise if a scaled gradient was changed without its guard: by autograd, in C++."""
        if self.scale != 1.0 and compat.version(tensor) != self.version:
            raise BackwardError(
                f"the gradient of {self.name!r} was scaled (clip_grad_norm_), and then a backward "
                "outside of the model added to it; call that backward before you clip"
            )

    @staticmethod
    def serve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve norms and factors, and zeroing of a consumed or unsummed gradient."""
        served = _SERVED.get(function)
        return NotImplemented if served is None else served(function, args, kwargs)

    def norm(self, tensor: torch.Tensor, order: float) -> torch.Tensor | None:
        """The recorded norm, 0-d on the host with the tensor's dtype, as torch returns it; None if
        unknown.

        Another dtype would make the factor of all gradients float32, and torch multiplies bf16
        gradients by a float32 factor with one kernel per tensor, five times slower than with a
        fused kernel.
        """
        orders = (2,) if self.state is GuardState.TAKEN else (2, math.inf)
        if self.norms is None or order not in orders or compat.version(tensor) != self.version:
            return None
        norm = self.norms()[orders.index(order)] * abs(self.scale)
        return torch.tensor(norm, dtype=tensor.dtype)


def is_consumed(name: str) -> OptimizerError:
    """The error for a use of a gradient that an update in the backward has consumed."""
    return OptimizerError(
        f"p.grad of {name!r} does not exist: megacompile(model, optimizer=...) has updated in the "
        "backward, and gradients never leave the device, so they cannot be read, clipped by their "
        "global norm, unscaled by a GradScaler (if the loss was scaled, load a checkpoint: "
        "parameters and states are wrong) or used by another optimizer; leave out optimizer=, or "
        "put the backward into `with megacompile.accumulate(model):` and clip micro-batches. "
        "clip_grad_norm_(parameters, inf) returns only the norm (max_grad_norm=0 in a Trainer)"
    )


# The served functions. A list of gradients may mix states and plain gradients.


def _norms(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The recorded norms of gradients. If one has none, torch computes all of them; if an update
    consumed some gradients, only the norms that are not recorded are computed."""
    tensors = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    states = set(map(state_of, tensors))
    guards = [(guard_of(tensor), tensor) for tensor in tensors]
    order = args[1] if len(args) == 2 else kwargs.get("ord", 2)
    if len(args) > 2 or kwargs.keys() - {"ord"} or not isinstance(order, (int, float)):
        return NotImplemented
    found: list[torch.Tensor] = []
    for who, tensor in guards:
        norm = who.norm(tensor, order) if isinstance(who, GradientGuard) else None
        if norm is None:
            if GuardState.TAKEN not in states or is_taken(tensor):
                return NotImplemented
            norm = torch.linalg.vector_norm(opened(tensor), order)
        found.append(norm)
    return found if function is compat.FOREACH_NORM else found[0]


def _multiply(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a factor, or detect that it changes nothing."""
    if len(args) != 2 or kwargs:
        return NotImplemented
    several = function is compat.FOREACH_MUL
    tensors, factor = args[0] if several else args[:1], args[1]
    if isinstance(factor, torch.Tensor):
        if factor.dim() or factor.requires_grad or factor.is_complex():
            return NotImplemented
    elif not isinstance(factor, (int, float)):
        return NotImplemented
    states = set(map(state_of, tensors))
    if GuardState.TAKEN in states:
        if float(factor) != 1.0:
            return NotImplemented  # `open` raises: the update has consumed it
    else:  # recorded for all of the gradients, or for none
        if states != {GuardState.LAZY}:
            return NotImplemented
        if not all(t.is_floating_point() and compat.version(t) == t.guard.version for t in tensors):
            return NotImplemented
        for who in [tensor.guard for tensor in tensors]:
            who.settle()  # a running update uses the earlier factor
            who.scale *= float(factor)
    return None if several else args[0]


def _zero(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serve `zero_grad(set_to_none=False)`. Zeros are equal in all replicas, so they need no sum; a
    consumed gradient has no memory to zero."""
    several = function is compat.FOREACH_ZERO
    tensors = args[0] if several else args[:1]
    for tensor in filter(is_unsummed, tensors):
        release(tensor)
    if not any(map(is_taken, tensors)):
        return NotImplemented
    for tensor in tensors:
        if not is_taken(tensor):
            opened(tensor).zero_()
    return None if several else args[0]


def _detach(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if is_taken(args[0]) or is_unsummed(args[0]) else NotImplemented


_SERVED: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.linalg.vector_norm: _norms,
    compat.FOREACH_NORM: _norms,
    torch.Tensor.mul_: _multiply,
    compat.FOREACH_MUL: _multiply,
    torch.Tensor.zero_: _zero,
    compat.FOREACH_ZERO: _zero,
    torch.Tensor.detach_: _detach,
}


def lazy_of(tensor: torch.Tensor | None) -> GradientGuard | None:
    """The guard of a lazy gradient; None for any other."""
    who = guard_of(tensor)
    return who if isinstance(who, GradientGuard) and who.state is GuardState.LAZY else None


def is_taken(gradient: torch.Tensor | None) -> bool:
    return state_of(gradient) is GuardState.TAKEN


def is_unsummed(gradient: torch.Tensor | None) -> bool:
    return state_of(gradient) is GuardState.UNSUMMED


def take(
    param: nn.Parameter, name: str, norms: Callable[[], Sequence[float]] | None = None
) -> None:
    """Mark `p.grad` as consumed; it needs no memory."""
    mine = compat.local(param)
    zero = _zero_of(param.grad_dtype or param.dtype, mine.device)
    gradient = compat.like(param, zero.expand(mine.shape))
    GradientGuard(gradient, GuardState.TAKEN, name, norms)
    param.grad = gradient


@functools.cache
def _zero_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def leave_unsummed(param: nn.Parameter, name: str) -> None:
    if param.grad is not None:
        GradientGuard(param.grad, GuardState.UNSUMMED, name)
