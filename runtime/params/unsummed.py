"""Gradients whose sum over replicas waits for a later backward.

In a micro-batch that is not the last, a backward sums over the ranks that shard, and not over
those with the same rows (`Schedule.defers`). What it leaves in `p.grad` is part of a sum: each
replica has another one. Who read it, clipped by it or stepped with it would do so with other
numbers in each replica, so that is an error. The last backward takes it as it is, and makes the
sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.params.guards import guard, guard_of, release

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
