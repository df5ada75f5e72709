"""The optimizers that can update streamed parameters.

Adam, SGD and Lion have a rule (see `rule.py`). Their formulas, with g = scale * grad:

    Adam, AdamW   g = g + l2 * p;   p = decay * p
    AMSGrad       m = lerp(m, g, 1 - beta1);   v = beta2 * v + (1 - beta2) * g^2
                  p = p - step_size * m / (sqrt(v or max(v)) + eps)
    SGD           g = g + l2 * p
                  m = g on the first step, then momentum * m + (1 - dampening) * g
                  p = p - lr * d,   d = m, or g + momentum * m (Nesterov), or g (no momentum)
    Lion          p = decay * p - lr * sign(beta1 * m + (1 - beta1) * g)
                  m = beta2 * m + (1 - beta2) * g

Adam's step_size and eps include the bias corrections. Sources, and whose order of operations it is:

    Adam   Kingma & Ba, 2015, arXiv 1412.6980; Loshchilov & Hutter, 2019, arXiv 1711.05101; Reddi et
           al., 2018, arXiv 1904.09237; torch.optim.adam's _single_tensor_adam
    SGD    Sutskever et al., "On the importance of initialization and momentum in deep learning",
           2013; torch.optim.sgd's _single_tensor_sgd
    Lion   Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv 2302.06675; the
           package lion-pytorch

The own step of Muon and Adafactor runs on the device, because their update is not elementwise.

    Muon        matrix products. Jordan et al., "Muon: An optimizer for hidden layers in neural
                networks", 2024
    Adafactor   means over rows and columns. Shazeer & Stern, "Adafactor: Adaptive Learning Rates
                with Sublinear Memory Cost", 2018, arXiv 1804.04235

To add an optimizer, write its rule or its `OwnStep`, and list it in `RULES` or `KNOWN`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from megacompile.runtime.optim.rule import (
    Group,
    KnownOptimizer,
    Moment,
    OptimizerRule,
    Option,
    OwnStep,
    is_number,
    numbers,
)
from megacompile.runtime.optim.twin import TorchLanguage as tl


def _adam_scalars(group: Group, step: float, first: bool) -> tuple[float, ...]:
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


def _adam(p, g, states, h):
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = h
    g = tl.where(l2 != 0, g + l2 * p, g)  # 0 * inf is not 0
    p = p * decay
    # torch.lerp's formula for small weights; compiled code would decompose torch.lerp itself
    m = states[0] + one_minus_beta1 * (g - states[0])
    v = states[1] * beta2 + one_minus_beta2 * g * g
    v_hat = v
    later = (m, v)
    if len(states) == 3:
        v_hat = tl.where((states[2] > v) | (states[2] != states[2]), states[2], v)  # or NaN
        later = (m, v, v_hat)
    if p.dtype == tl.float32:  # Triton's plain sqrt and division are approximate in fp32
        p = p + tl.div_rn(step_size * m, tl.sqrt_rn(v_hat) + eps)
    else:
        p = p + step_size * m / (tl.sqrt(v_hat) + eps)
    return p, later


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_number, value))


def _are_betas(value: Any) -> bool:
    return _are_numbers(value) and all(0 <= float(beta) < 1 for beta in value)


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
    scalars=_adam_scalars,
    arithmetic=_adam,
)

USUAL = {  # the options of a parameter group of torch.optim.AdamW
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "decoupled_weight_decay": True,
}


def _sgd_scalars(group: Group, step: float, first: bool) -> tuple[float, ...]:
    return (
        float(group["weight_decay"]),  # l2
        -float(group["lr"]),
        float(group["momentum"]),
        1 - float(group["dampening"]),
        float(first),
        float(bool(group.get("nesterov", False))),
    )


def _sgd(p, g, states, h):
    l2, negative_lr, momentum, one_minus_dampening, first, nesterov = h
    g = tl.where(l2 != 0, g + l2 * p, g)
    direction = g
    later = states
    if len(states) == 1:
        # the momentum's memory may hold anything before the first step, even NaN
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
    scalars=_sgd_scalars,
    arithmetic=_sgd,
)


def _lion_scalars(group: Group, step: float, first: bool) -> tuple[float, ...]:
    lr = float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decay = 1 - lr * float(group["weight_decay"])  # the parameter's factor
    return (decay, -lr, beta1, 1 - beta1, beta2, 1 - beta2)


def _lion(p, g, states, h):
    decay, negative_lr, beta1, one_minus_beta1, beta2, one_minus_beta2 = h
    m = states[0]
    update = m * beta1 + one_minus_beta1 * g
    sign = (update > 0).to(p.dtype) - (update < 0).to(p.dtype)
    return p * decay + negative_lr * sign, (m * beta2 + one_minus_beta2 * g,)


def _unlike_lion(optimizer: Optimizer) -> str:
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
    options=(*numbers("lr", "weight_decay"), Option("betas", _are_numbers, "two numbers")),
    unsupported_reason=_unlike_lion,
    scalars=_lion_scalars,
    arithmetic=_lion,
)


class _Adafactor(OwnStep):
    def shapes(
        self, group: Group, shape: Sequence[int], state: Mapping[str, Any]
    ) -> Iterable[tuple[str, Sequence[int]]]:
        if len(shape) < 2:
            return (("variance", shape),)
        return (("row_var", (*shape[:-1], 1)), ("col_var", (*shape[:-2], 1, shape[-1])))


MUON = OwnStep(
    types=(torch.optim.Muon,),
    counts=False,
    moments=(Moment("momentum_buffer", option="momentum", late=True),),
    takes_dtensors=True,
)
ADAFACTOR = _Adafactor(
    types=(torch.optim.Adafactor,),
    counts=True,
    takes_dtensors=False,  # its step squares a norm in place, which DTensor does not support
)
RULES = (ADAM, SGD, LION)
KNOWN: tuple[KnownOptimizer, ...] = (*RULES, MUON, ADAFACTOR)
_BY_CLASS: dict[type | str, KnownOptimizer] = {kind: each for each in KNOWN for kind in each.types}


def known(kind: type[Optimizer]) -> KnownOptimizer | None:
    """The entry for a class of optimizers; None: their own step updates, on the host."""
    return _BY_CLASS.get(kind) or _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")


def rule_of(optimizer: Optimizer) -> OptimizerRule | None:
    entry = known(type(optimizer))
    return entry if isinstance(entry, OptimizerRule) else None


def listed(optimizers: Sequence[KnownOptimizer], last: str = "and") -> str:
    """The names of the optimizers' classes: "AdamW, Adam and SGD"."""
    names = [name for each in optimizers for name in each.names]
    return f"{', '.join(names[:-1])} {last} {names[-1]}"
