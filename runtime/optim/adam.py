"""Adam, AdamW and AMSGrad.

    g = scale * grad + l2 * p                 p = decay * p
    m = lerp(m, g, 1 - beta1)                 v = beta2 * v + (1 - beta2) * g^2
    p = p - step_size * m / (sqrt(v or max(v)) + eps)

where step_size and eps include the bias corrections.

Sources: Kingma & Ba, 2015, arXiv 1412.6980; Loshchilov & Hutter, 2019, arXiv 1711.05101; Reddi et
al., 2018, arXiv 1904.09237. Operations are in the order of torch.optim.adam's _single_tensor_adam.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megacompile.runtime.optim.rule import (
    Group,
    Moment,
    OptimizerRule,
    Option,
    is_number,
    numbers,
)
from megacompile.runtime.optim.twin import sqrt

if TYPE_CHECKING:  # see `OptimizerRule.kernel`
    import triton.language as tl


def scalars(group: Group, step: float, first: bool) -> tuple[float, ...]:
    """Scalars of the `step`-th step, counted from 1."""
    del first
    lr = float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    weight_decay = float(group["weight_decay"])
    decoupled = bool(group.get("decoupled_weight_decay", False))
    correction = (1 - beta2**step) ** 0.5
    return (
        0.0 if decoupled else weight_decay,  # l2: added to the gradient (Adam)
        1 - lr * weight_decay if decoupled else 1.0,  # decay: the parameter's factor (AdamW)
        1 - beta1,
        beta2,
        1 - beta2,
        -(lr / (1 - beta1**step)) * correction,  # the negative step size
        float(group["eps"]) * correction,  # saves one of torch.optim's divisions
    )


def twin(
    p: Tensor, g: Tensor, states: tuple[Tensor, ...], h: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `rule.Twin`."""
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = h
    g = torch.where(l2 != 0, g + l2 * p, g)  # 0 * inf is not 0
    p = p * decay
    # torch.lerp's formula for small weights; compiled code would decompose torch.lerp itself
    m = states[0] + one_minus_beta1 * (g - states[0])
    v = states[1] * beta2 + one_minus_beta2 * g * g
    v_hat = v if len(states) == 2 else torch.maximum(states[2], v)
    p = p + step_size * m / (sqrt(v_hat) + eps)
    return p, (m, v) if len(states) == 2 else (m, v, v_hat)


def adam_kernel(p, g, states, h):
    """The twin in Triton."""
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = h
    g = tl.where(l2 != 0, g + l2 * p, g)
    p = p * decay
    m = states[0] + one_minus_beta1 * (g - states[0])
    v = states[1] * beta2 + one_minus_beta2 * g * g
    v_hat = v
    later = (m, v)
    if len(states) == 3:
        v_hat = tl.maximum(states[2], v, propagate_nan=tl.PropagateNan.ALL)
        later = (m, v, v_hat)
    if p.dtype == tl.float32:  # plain sqrt and division are approximate in fp32
        p = p + tl.div_rn(step_size * m, tl.sqrt_rn(v_hat) + eps)
    else:
        p = p + step_size * m / (tl.sqrt(v_hat) + eps)
    return p, later


def _are_betas(value: Any) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    return pair and all(is_number(beta) and 0 <= float(beta) < 1 for beta in value)


ADAM = OptimizerRule(
    name="adam",
    types=(torch.optim.AdamW, torch.optim.Adam),
    counts=True,
    moments=(
        Moment("exp_avg"),
        Moment("exp_avg_sq", signed=False),
        Moment("max_exp_avg_sq", signed=False, option="amsgrad"),
    ),
    options=(
        *numbers("lr", "weight_decay", "eps"),
        Option("betas", _are_betas, "two numbers of at least 0, below 1"),
    ),
    scalars=scalars,
    twin=twin,
    kernel=adam_kernel,
)

USUAL = {  # the options of a parameter group of torch.optim.AdamW
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "decoupled_weight_decay": True,
}
