"""Gradients that an update in the backward has taken.

Nothing is left of them but their L2 norms, which the backward took before it used them up. So loops
that log the norm of the gradients go on: `clip_grad_norm_(parameters, inf)`, `get_total_norm`. A
factor of 1, which clipping returns where the norm is small enough, changes nothing. Any other use
is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.params.guards import guard, guard_of, release
from megacompile.runtime.params.lazy import HostGradient


class Consumed:
    """Guards a `p.grad` that is gone: the backward has made an update of it.

    Args:
        name: of the parameter.
        norm: returns the gradient's L2 norm; None where it was not taken.
    """

    def __init__(self, name: str, norm: Callable[[], float] | None = None) -> None:
        self.name = name
        self.norm = norm

    def open(self, tensor: torch.Tensor) -> None:
        del tensor
        raise OptimizerError(
            f"p.grad of {self.name!r} is not there: megacompile(model, optimizer=...) updates in "
            "the backward, and gradients never leave the device, so they cannot be read, clipped "
            "by their global norm or unscaled by a GradScaler; for those leave out optimizer=, or "
            "use megacompile.accumulate(model) around the backward, and clip micro-batches"
        )

    def scale(self, factor: float) -> None:
        """It is multiplied.

        Raises:
            OptimizerError: by something else than 1.
        """
        if factor != 1.0:
            raise OptimizerError(
                f"p.grad of {self.name!r} cannot be multiplied by {factor:g}: megacompile(model, "
                "optimizer=...) has made the update in the backward already, with the gradients as "
                "they were, so this step is not clipped; leave out optimizer= to clip by the "
                "global norm. clip_grad_norm_(parameters, inf) gives the norm alone "
                "(max_grad_norm=0 in a Trainer)"
            )

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Norms, a factor of 1, and `zero_grad(set_to_none=False)`, which has nothing to do.

        Raises:
            OptimizerError: a GradScaler unscales it, too late; or it is clipped, too late.
        """
        if function is compat.FOREACH_UNSCALE:
            raise OptimizerError(
                f"p.grad of {self.name!r} cannot be unscaled: megacompile(model, optimizer=...) "
                "has made the update in the backward. If the loss was scaled, parameters and "
                "optimizer states are wrong now: load a checkpoint of both. For a GradScaler leave "
                "out optimizer=; bfloat16 needs none"
            )
        if function in (torch.Tensor.zero_, torch.Tensor.detach_):
            return args[0]
        served = _FUNCTIONS.get(function)
        return NotImplemented if served is None else served(args, kwargs)


def consumed(gradient: torch.Tensor | None) -> bool:
    """True if an update in the backward has taken it."""
    return gradient is not None and isinstance(guard_of(gradient), Consumed)


def consume(param: nn.Parameter, name: str, norm: Callable[[], float] | None = None) -> None:
    """Marks `p.grad` as consumed; it takes no memory."""
    dtype = param.grad_dtype or param.dtype
    mine = compat.local(param)
    gradient = compat.like(param, _zero(dtype, mine.device).expand(mine.shape))
    guard(gradient, Consumed(name, norm))
    param.grad = gradient


def follow(param: nn.Parameter) -> None:
    """Moves a `p.grad` that is consumed to where its parameter has moved."""
    gradient = param.grad
    who = None if gradient is None else guard_of(gradient)
    if gradient is not None and isinstance(who, Consumed) and gradient.device != param.device:
        param.grad = None
        consume(param, who.name, who.norm)


def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zero, 0-d; of a GPU one for all."""
    if device.type == "cpu":
        return torch.zeros((), dtype=dtype)
    return _zero_there(dtype, device)


@functools.cache
def _zero_there(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


# What is called on a list of gradients may meet others among them.


def _norm(tensor: torch.Tensor, order: float) -> torch.Tensor | None:
    """The norm of a gradient, 0-d and of its dtype; None: it is gone, and this was not taken."""
    who = guard_of(tensor)
    if isinstance(who, Consumed):
        if order != 2 or who.norm is None:
            return None
        return torch.tensor(who.norm(), dtype=tensor.dtype)
    norm = who.norm(tensor, order) if isinstance(who, HostGradient) else None
    if norm is None:
        norm = torch.linalg.vector_norm(_opened(tensor), order)
    return norm


def _norms(tensors: Sequence[Any], args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """Their norms; None: some are not known, or something else is asked for."""
    order = args[1] if len(args) == 2 else kwargs.get("ord", 2)
    if len(args) > 2 or kwargs.keys() - {"ord"} or not isinstance(order, (int, float)):
        return None
    found = []
    for tensor in tensors:
        norm = _norm(tensor, order)
        if norm is None:
            return None
        found.append(norm)
    return found


def _vector_norm(args: Any, kwargs: Any) -> Any:
    norms = _norms(args[:1], args, kwargs)
    return NotImplemented if norms is None else norms[0]


def _foreach_norm(args: Any, kwargs: Any) -> Any:
    norms = _norms(args[0], args, kwargs)
    return NotImplemented if norms is None else norms


def _scale(tensors: Sequence[Any], args: Any, kwargs: Any) -> bool:
    """Multiply by 1, which changes nothing; False: by something that is no factor.

    Raises:
        OptimizerError: by another one, which one of them at least is too late for.
    """
    if len(args) != 2 or kwargs or isinstance(args[1], (list, tuple)):
        return False
    if isinstance(args[1], torch.Tensor) and args[1].dim() != 0:
        return False
    factor = float(args[1])
    for tensor in tensors:
        who = guard_of(tensor)
        if isinstance(who, Consumed):
            who.scale(factor)
    return True


def _mul(args: Any, kwargs: Any) -> Any:
    return args[0] if _scale(args[:1], args, kwargs) else NotImplemented


def _foreach_mul(args: Any, kwargs: Any) -> Any:
    return None if _scale(args[0], args, kwargs) else NotImplemented


def _foreach_zero(args: Any, kwargs: Any) -> Any:
    del kwargs
    for tensor in args[0]:
        if not consumed(tensor):
            _opened(tensor).zero_()


def _opened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be used."""
    who = guard_of(tensor)
    if who is not None:
        who.open(tensor)
    return tensor


_FUNCTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    compat.FOREACH_NORM: _foreach_norm,
    torch.Tensor.mul_: _mul,
    compat.FOREACH_MUL: _foreach_mul,
    compat.FOREACH_ZERO: _foreach_zero,
}


# Gradients whose sum over replicas waits for a later backward.
#
# In a micro-batch that is not the last, a backward sums over the ranks that shard, and not over
# those with the same rows (`Schedule.defers`). What it leaves in `p.grad` is part of a sum: each
# replica has another one. Who read it, clipped by it or stepped with it would do so with other
# numbers in each replica, so that is an error. The last backward takes it as it is, and makes the
# sum.

_WHY = (
    "its last backward ran inside of megacompile.accumulate(model), or a loop (of Accelerate, of a "
    "Trainer) said that another one comes before the step; leave the last micro-batch out of "
    "accumulate(), or optimizer.zero_grad()"
)


class Unsummed:
    """Guards a `p.grad` that lacks its sum over replicas.

    Args:
        name: of the parameter.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, tensor: torch.Tensor) -> None:
        del tensor
        raise OptimizerError(
            f"p.grad of {self.name!r} is not summed over replicas yet, so it cannot be read, "
            f"clipped, or added to by a backward outside of the model: {_WHY}"
        )

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        """`zero_grad(set_to_none=False)`: zeros are the same in all replicas."""
        del kwargs
        if function is torch.Tensor.detach_:
            return args[0]
        if function is torch.Tensor.zero_:
            release(args[0])
        elif function is compat.FOREACH_ZERO:
            for tensor in filter(unsummed, args[0]):
                release(tensor)
        return NotImplemented


def unsummed(gradient: torch.Tensor | None) -> bool:
    """True if a gradient lacks its sum over replicas."""
    return isinstance(guard_of(gradient), Unsummed)


def leave_unsummed(param: nn.Parameter, name: str) -> None:
    """Marks `p.grad` as lacking its sum over replicas."""
    if param.grad is not None:
        guard(param.grad, Unsummed(name))


def note_sum(param: nn.Parameter) -> None:
    """`p.grad` is summed over replicas: anybody may use it."""
    if param.grad is not None and unsummed(param.grad):
        release(param.grad)


def sum_late(params: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Sum over replicas what lacks that, outside of a schedule: a collective, if there is any.

    Args:
        params: by name, alike in all ranks.
    """
    late = {name: param for name, param in params.items() if unsummed(param.grad)}
    if late:
        ranks.average_late({name: compat.local(param.grad) for name, param in late.items()})
    for param in late.values():
        note_sum(param)


def refuse_unsummed(where: str, name: str, replicas: int) -> None:
    """Raise for the first gradient that a step finds without its sum.

    Raises:
        OptimizerError: always.
    """
    raise OptimizerError(
        f"{where}: the gradient of {name!r} is not summed over the {replicas} replicas yet "
        f"(nothing was updated): {_WHY}"
    )
