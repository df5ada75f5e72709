"""Lion: the sign of a momentum, with decoupled weight decay.

    g = scale * grad                          p = decay * p
    p = p - lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g

Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv 2302.06675.
Operations are in the order of the package lion-pytorch.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megacompile.runtime.optim.rule import (
    Group,
    Moment,
    OptimizerRule,
    Option,
    is_number,
    numbers,
)

if TYPE_CHECKING:  # see `OptimizerRule.kernel`
    import triton.language as tl


def scalars(group: Group, step: float, first: bool) -> tuple[float, ...]:
    """Scalars of any step."""
    del step, first
    lr = float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decay = 1 - lr * float(group["weight_decay"])  # the parameter's factor
    return (decay, -lr, beta1, 1 - beta1, beta2, 1 - beta2)


def twin(
    p: Tensor, g: Tensor, states: tuple[Tensor, ...], h: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `rule.Twin`."""
    decay, negative_lr, beta1, one_minus_beta1, beta2, one_minus_beta2 = h
    m = states[0]
    direction = torch.sign(m * beta1 + one_minus_beta1 * g)
    return p * decay + negative_lr * direction, (m * beta2 + one_minus_beta2 * g,)


def lion_kernel(p, g, states, h):
    """The twin in Triton."""
    decay, negative_lr, beta1, one_minus_beta1, beta2, one_minus_beta2 = h
    m = states[0]
    update = m * beta1 + one_minus_beta1 * g
    direction = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))  # NaN: 0
    p = p * decay + negative_lr * direction
    return p, (m * beta2 + one_minus_beta2 * g,)


def _are_betas(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_number, value))


def _unsupported_reason(optimizer: Optimizer) -> str:
    if getattr(optimizer, "decoupled_wd", False):
        return "decoupled_weight_decay=True divides by the optimizer's initial lr"
    if any("cautious_factor" in group for group in optimizer.param_groups):
        return "it is a cautious Lion"
    return ""


LION = OptimizerRule(
    name="lion",
    types=("lion_pytorch.lion_pytorch.Lion",),
    counts=False,
    moments=(Moment("exp_avg"),),
    options=(*numbers("lr", "weight_decay"), Option("betas", _are_betas, "two numbers")),
    unsupported_reason=_unsupported_reason,
    scalars=scalars,
    twin=twin,
    kernel=lion_kernel,
)
