"""Guards of gradients: a `p.grad` that returns a precomputed norm, records a factor, or raises.

**Lazy gradients.** An L2 norm over host gradients takes longer than the update itself, but each
gradient has been on the device, where its norm is nearly free. So `torch.linalg.vector_norm` and
`torch._foreach_norm` of `p.grad` return the norm computed there, and a multiplication only records
its factor: stock `clip_grad_norm_` and `get_total_norm` need nothing else. The optimizer applies
the factor. Any other use multiplies first and makes `p.grad` a plain tensor.

**Folded gradients.** `clip_grad_norm_` multiplies all gradients by one factor: 4 bytes of memory
traffic per bf16 element, in addition to the 22 of the update. A resident bucket's update reads the
gradient anyway: it multiplies, and rounds like `mul_`, so the numbers are bitwise equal
(`Update.factor`). The factor stays on the device: reading it on the host would wait for the
backward. torch computes the norms from the tensors as usual.

**Taken gradients.** A gradient consumed by an update in the backward leaves only its L2 norm, so
loops that log the norm keep working: `clip_grad_norm_(parameters, inf)`. A factor of 1, which
clipping returns for a small norm, changes nothing. Any other use is an error.

**Unsummed gradients.** Before the last micro-batch, a backward sums over the shard ranks, but not
over replicas (`Schedule.defers`). Each replica's `p.grad` holds a different part of the sum.
Reading it, clipping by it or stepping with it is an error. The last backward reads it as it is and
completes the sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import BackwardError, OptimizerError
from megacompile.runtime.device.ranks import Ranks
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
    """Guards one `p.grad` until its first use or its replacement.

    Args:
        tensor: the gradient.
        state: LAZY, FOLDED, TAKEN or UNSUMMED.
        name: the parameter's name.
        norms: returns its L2 norm and, if computed, its largest absolute value; None if neither was
            computed.
        work: the pending work of its bucket.
        copied: recorded after its copy to the host; users wait for it too.
    """

    __slots__ = ("copied", "factor", "name", "norms", "scale", "version", "work")

    def __init__(
        self,
        tensor: torch.Tensor,
        state: GuardState,
        name: str,
        norms: Callable[[], Sequence[float]] | None = None,
        *,
        work: Pending | None = None,
        copied: torch.cuda.Event | None = None,
    ) -> None:
        super().__init__(state)
        self.name = name
        self.norms = norms
        self.work = work
        self.copied = copied
        self.scale = 1.0  # lazy: the factor that is not applied yet
        self.factor: torch.Tensor | None = None  # folded: 0-d, of the tensor's dtype and device
        self.version = compat.version(tensor)
        guard([tensor], self)

    def open(self, tensor: torch.Tensor) -> None:
        """Apply the recorded factor and make the tensor plain.

        Raises:
            OptimizerError: the gradient is consumed or not summed yet.
            BackwardError: autograd has added to a scaled one.
        """
        if self.state is GuardState.TAKEN:
            raise OptimizerError(
                f"p.grad of {self.name!r} does not exist: megacompile(model, optimizer=...) "
                "updates in the backward, and gradients never leave the device, so they cannot be "
                "read, clipped by their global norm or unscaled by a GradScaler; leave out "
                "optimizer=, or put the backward into `with megacompile.accumulate(model):` and "
                "clip micro-batches"
            )
        if self.state is GuardState.UNSUMMED:
            raise OptimizerError(
                f"p.grad of {self.name!r} is not summed over replicas yet, so it cannot be read, "
                f"clipped, or added to by a backward outside of the model: {_WHY_UNSUMMED}"
            )
        self.settle()
        release(tensor)
        self.check(tensor)
        factor = self.scale if self.factor is None else self.factor
        if self.is_scaled:
            self.scale, self.factor = 1.0, None
            with torch.no_grad():
                tensor.mul_(factor)

    @property
    def is_scaled(self) -> bool:
        """True if a recorded factor is not applied yet."""
        return self.factor is not None or self.scale != 1.0

    def settle(self) -> None:
        """Wait until no background work reads or writes it."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.work is not None:
            self.work.wait()

    def check(self, tensor: torch.Tensor) -> None:
        """Raise if a scaled gradient was changed without its guard: by autograd, in C++."""
        if self.is_scaled and compat.version(tensor) != self.version:
            raise BackwardError(
                f"the gradient of {self.name!r} was scaled (clip_grad_norm_), and then a backward "
                "outside of the model added to it; call that backward before you clip"
            )

    @staticmethod
    def serve(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve norms and factors, and zeroing of a consumed or unsummed gradient.

        Raises:
            OptimizerError: a consumed gradient is scaled, too late.
        """
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


def lazy_of(tensor: torch.Tensor | None) -> GradientGuard | None:
    """The guard of a lazy or folded gradient; None for any other."""
    found = guard_of(tensor)
    is_lazy = isinstance(found, GradientGuard) and found.state in _NOTES_FACTOR
    return found if is_lazy else None  # type: ignore[return-value]


_NOTES_FACTOR = (GuardState.LAZY, GuardState.FOLDED)


def make_lazy(
    gradient: torch.Tensor,
    name: str,
    norms: Callable[[], Sequence[float]],
    work: Pending | None = None,
    copied: torch.cuda.Event | None = None,
) -> None:
    """Mark a `p.grad` on the host as lazy: it returns its norms and records a factor."""
    GradientGuard(gradient, GuardState.LAZY, name, norms, work=work, copied=copied)


def fold(gradient: torch.Tensor, name: str, work: Pending | None = None) -> None:
    """Mark a `p.grad` on the device as folded: it records a factor that its update applies."""
    GradientGuard(gradient, GuardState.FOLDED, name, work=work)


# The served functions. A list of gradients may mix states and plain gradients.


def _known(tensors: Sequence[Any]) -> list[GradientGuard]:
    return [who for who in map(guard_of, tensors) if isinstance(who, GradientGuard)]


def _norms(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The recorded norms of gradients. The others are computed only if updates consumed some of the
    gradients, whose norms cannot be computed."""
    tensors = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
    states = set(map(state_of, tensors))
    if states <= {None, GuardState.FOLDED}:
        if not args or "out" in kwargs:
            return NotImplemented
        for who, tensor in zip(map(guard_of, tensors), tensors, strict=True):
            if isinstance(who, GradientGuard) and who.factor is not None:
                who.open(tensor)
        return function(*args, **kwargs)
    order = args[1] if len(args) == 2 else kwargs.get("ord", 2)
    if len(args) > 2 or kwargs.keys() - {"ord"} or not isinstance(order, (int, float)):
        return NotImplemented
    found: list[torch.Tensor] = []
    for who, tensor in zip(map(guard_of, tensors), tensors, strict=True):
        norm = who.norm(tensor, order) if isinstance(who, GradientGuard) else None
        if norm is None:
            if GuardState.TAKEN not in states or state_of(tensor) is GuardState.TAKEN:
                return NotImplemented
            norm = torch.linalg.vector_norm(opened(tensor), order)
        found.append(norm)
    return found if function is compat.FOREACH_NORM else found[0]


def _multiply(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record a factor, or detect that it changes nothing."""
    if len(args) != 2 or kwargs or isinstance(args[1], (list, tuple)):
        return NotImplemented
    several = function is compat.FOREACH_MUL
    tensors, factor = args[0] if several else args[:1], args[1]
    if isinstance(factor, torch.Tensor) and factor.dim():
        return NotImplemented
    states = set(map(state_of, tensors))
    if GuardState.TAKEN in states:
        _refuse_factor(tensors, float(factor))
        noted = True
    elif states <= {None, GuardState.FOLDED}:
        noted = _fold(tensors, factor)
    else:
        noted = states == {GuardState.LAZY} and _scale(tensors, factor)
    if not noted:
        return NotImplemented
    return None if several else args[0]


def _refuse_factor(tensors: Sequence[Any], factor: float) -> None:
    """Raise if a factor other than 1 is too late for one of these gradients.

    Raises:
        OptimizerError: with the parameter's name.
    """
    for who in _known(tensors):
        if who.state is GuardState.TAKEN and factor != 1.0:
            raise OptimizerError(
                f"p.grad of {who.name!r} cannot be multiplied by {factor:g}: megacompile(model, "
                "optimizer=...) has already updated in the backward, without clipping; leave out "
                "optimizer= to clip by the global norm. clip_grad_norm_(parameters, inf) returns "
                "only the norm (max_grad_norm=0 in a Trainer)"
            )


def _scale(tensors: Sequence[Any], factor: Any) -> bool:
    """Record a number for all of these lazy gradients, or for none."""
    if isinstance(factor, torch.Tensor):
        if factor.is_complex() or factor.requires_grad:
            return False
    elif not isinstance(factor, (int, float)):
        return False
    guards = _known(tensors)
    if not all(
        tensor.is_floating_point() and compat.version(tensor) == who.version
        for who, tensor in zip(guards, tensors, strict=True)
    ):
        return False
    value = float(factor)
    for who in guards:
        who.settle()  # a running update uses the earlier factor
        who.scale *= value
    return True


def _fold(tensors: Sequence[Any], factor: Any) -> bool:
    """Record a factor on the device where possible, and multiply the other gradients; False: the
    caller must multiply.

    The recorded factor is a copy, because the caller may change it. A factor of another dtype
    rounds differently and is not recorded.
    """
    if type(factor) is not torch.Tensor or factor.requires_grad:
        return False
    own, others = factor.clone(), []
    for tensor in tensors:
        who = guard_of(tensor)
        if isinstance(who, GradientGuard):
            if (
                who.factor is None
                and factor.dtype is tensor.dtype
                and factor.device == tensor.device
                and tensor.is_floating_point()
            ):
                who.settle()
                who.factor, who.version = own, compat.version(tensor)
                continue
            who.open(tensor)
        others.append(tensor)
    if others:
        compat.FOREACH_MUL(others, factor)
    return True


def _zero(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`zero_grad(set_to_none=False)`: zeros are equal in all replicas, and a consumed gradient has
    nothing to fill."""
    del kwargs
    several = function is compat.FOREACH_ZERO
    tensors = args[0] if several else args[:1]
    takes = False
    for tensor in tensors:
        takes = takes or is_taken(tensor)
        if is_unsummed(tensor):
            release(tensor)
    if not takes:
        return NotImplemented
    for tensor in tensors:
        if not is_taken(tensor):
            opened(tensor).zero_()
    return None if several else args[0]


def _detach(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del function, kwargs
    return args[0] if is_taken(args[0]) or is_unsummed(args[0]) else NotImplemented


def _unscale(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """
    Raises:
        OptimizerError: a GradScaler unscales a consumed gradient, too late.
    """
    del function, kwargs
    for who in _known(args[0]):
        if who.state is GuardState.TAKEN:
            raise OptimizerError(
                f"p.grad of {who.name!r} cannot be unscaled: megacompile(model, optimizer=...) has "
                "already updated in the backward. If the loss was scaled, parameters and "
                "optimizer states are wrong now: load a checkpoint of both. Leave out optimizer= "
                "to use a GradScaler; bfloat16 needs none"
            )
    return NotImplemented


_SERVED: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.linalg.vector_norm: _norms,
    compat.FOREACH_NORM: _norms,
    torch.Tensor.mul_: _multiply,
    compat.FOREACH_MUL: _multiply,
    torch.Tensor.zero_: _zero,
    compat.FOREACH_ZERO: _zero,
    torch.Tensor.detach_: _detach,
    compat.FOREACH_UNSCALE: _unscale,
}


# Gradients consumed by an update in the backward.


def is_taken(gradient: torch.Tensor | None) -> bool:
    """True if an update in the backward has consumed it."""
    return state_of(gradient) is GuardState.TAKEN


def take(
    param: nn.Parameter, name: str, norms: Callable[[], Sequence[float]] | None = None
) -> None:
    """Mark `p.grad` as consumed; it needs no memory."""
    dtype = param.grad_dtype or param.dtype
    mine = compat.local(param)
    gradient = compat.like(param, _zero_of(dtype, mine.device).expand(mine.shape))
    GradientGuard(gradient, GuardState.TAKEN, name, norms)
    param.grad = gradient


def follow(param: nn.Parameter) -> None:
    """Move a consumed `p.grad` to its parameter's device."""
    gradient = param.grad
    if gradient is not None and is_taken(gradient) and gradient.device != param.device:
        (who,) = _known([gradient])
        param.grad = None
        take(param, who.name, who.norms)


def _zero_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 0-d zero; one per GPU, shared."""
    if device.type == "cpu":
        return torch.zeros((), dtype=dtype)
    return _zero_there(dtype, device)


@functools.cache
def _zero_there(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


# Gradients that are not summed over replicas yet.

_WHY_UNSUMMED = (
    "its last backward ran inside of megacompile.accumulate(model), or a loop (Accelerate, "
    "Trainer) announced another one before the step; run the last micro-batch outside of "
    "accumulate(), or call optimizer.zero_grad()"
)


def is_unsummed(gradient: torch.Tensor | None) -> bool:
    """True if it is not summed over replicas yet."""
    return state_of(gradient) is GuardState.UNSUMMED


def leave_unsummed(param: nn.Parameter, name: str) -> None:
    """Mark `p.grad` as not summed over replicas yet."""
    if param.grad is not None:
        GradientGuard(param.grad, GuardState.UNSUMMED, name)


def note_sum(param: nn.Parameter) -> None:
    """Mark `p.grad` as summed over replicas and usable."""
    if param.grad is not None and is_unsummed(param.grad):
        release(param.grad)


def sum_late(params: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Sum unsummed gradients over replicas, outside of a schedule: a collective, if there are any.

    Args:
        params: name -> parameter, equal in all ranks.
    """
    late = {name: param for name, param in params.items() if is_unsummed(param.grad)}
    if late:
        ranks.average_late({name: compat.local(param.grad) for name, param in late.items()})
    for param in late.values():
        note_sum(param)


def refuse_unsummed(where: str, name: str, replicas: int) -> None:
    """Raise for the first unsummed gradient in a step.

    Raises:
        OptimizerError: always.
    """
    raise OptimizerError(
        f"{where}: the gradient of {name!r} is not summed over the {replicas} replicas yet "
        f"(nothing was updated): {_WHY_UNSUMMED}"
    )
