"""SGD, with momentum and Nesterov momentum.

    g = scale * grad + l2 * p
    m = g on the first step, then momentum * m + (1 - dampening) * g
    p = p - lr * d,   d = m, or g + momentum * m (Nesterov), or g (no momentum)

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
Formulas and order of operations are those of torch.optim.sgd's _single_tensor_sgd.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megacompile.runtime.optim.rule import Group, Moment, OptimizerRule, numbers

if TYPE_CHECKING:  # see `OptimizerRule.kernel`
    import triton.language as tl


def scalars(group: Group, step: float, first: bool) -> tuple[float, ...]:
    """Scalars of any step. The first one sets the momentum to the gradient."""
    del step
    return (
        float(group["weight_decay"]),  # l2
        -float(group["lr"]),
        float(group["momentum"]),
        1 - float(group["dampening"]),
        float(first),
        float(bool(group.get("nesterov", False))),
    )


def twin(
    p: Tensor, g: Tensor, states: tuple[Tensor, ...], h: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `rule.Twin`."""
    l2, negative_lr, momentum, one_minus_dampening, first, nesterov = h
    g = torch.where(l2 != 0, g + l2 * p, g)  # 0 * inf is not 0
    if not states:
        return p + negative_lr * g, ()
    # the momentum's memory may hold anything before the first step, even NaN
    m = torch.where(first != 0, g, states[0] * momentum + one_minus_dampening * g)
    direction = torch.where(nesterov != 0, g + momentum * m, m)
    return p + negative_lr * direction, (m,)


def sgd_kernel(p, g, states, h):
    """The twin in Triton."""
    l2, negative_lr, momentum, one_minus_dampening, first, nesterov = h
    g = tl.where(l2 != 0, g + l2 * p, g)
    direction = g
    later = states
    if len(states) == 1:
        m = tl.where(first != 0, g, states[0] * momentum + one_minus_dampening * g)
        direction = tl.where(nesterov != 0, g + momentum * m, m)
        later = (m,)
    return p + negative_lr * direction, later


SGD = OptimizerRule(
    name="sgd",
    types=(torch.optim.SGD,),
    counts=False,
    moments=(Moment("momentum_buffer", option="momentum", late=True),),
    options=numbers("lr", "weight_decay", "momentum", "dampening"),
    scalars=scalars,
    twin=twin,
    kernel=sgd_kernel,
)
