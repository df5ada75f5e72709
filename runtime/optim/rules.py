"""The optimizers' update rules on one parameter, in plain torch and in place.

Each rule is pure pointwise code on flat tensors, with its scalars as data, so that one
`torch.compile(rule, dynamic=True, fullgraph=True)` serves every step and size; it is also the twin
that the Triton kernel of the same name (runtime/kernels) is tested against. The arithmetic is fp32,
fp64 for fp64 parameters, in the order of torch.optim's single-tensor implementations.

[Note: stochastic rounding]
To round fp32 to bf16, a random 16-bit number is added to the low half of the bit pattern, and the
half is cut off: the mean over the random numbers is the unrounded value. The number is the low half
of the first word of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011) with the element's index as the counter and a seed for the parameter and step as the key. It
is the word of `tl.randint(seed, index)`, so kernel and twin round alike, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from megacompile.runtime.optim.blockwise import dequantize, quantize, tables

Scalar = TypeVar("Scalar", float, Tensor)

# A tensor of the parameter's numel, or (codes, absmax) as blockwise.quantize returns them.
State: TypeAlias = Tensor | tuple[Tensor, Tensor]

_WORD = 0xFFFFFFFF  # 32 bits
_LOW = 0xFFFF


class AdamHyper(NamedTuple, Generic[Scalar]):
    """The scalars of one Adam, AdamW or AMSGrad step, the columns of its `hyper`."""

    scale: Scalar  # factor of the gradient; negative to maximize
    l2: Scalar  # weight decay that joins the gradient (Adam); else 0
    decay: Scalar  # factor of the parameter: 1 - lr * weight_decay (AdamW); else 1
    one_minus_beta1: Scalar
    beta2: Scalar
    one_minus_beta2: Scalar
    negative_step_size: Scalar  # -lr / (1 - beta1^step) * sqrt(1 - beta2^step)
    eps: Scalar  # eps * sqrt(1 - beta2^step): one division less than in torch.optim's order


class SgdHyper(NamedTuple, Generic[Scalar]):
    """The scalars of one SGD step, the columns of its `hyper`."""

    scale: Scalar  # factor of the gradient; negative to maximize
    l2: Scalar  # weight decay
    negative_lr: Scalar
    momentum: Scalar
    one_minus_dampening: Scalar
    first: Scalar  # 1 on the buffer's first step, when it becomes the gradient; else 0


class Rule(Enum):
    """What `kernels.bucket.update_bucket` can do; the value is how many states it has."""

    ADAM = ("adam", 3)  # exp_avg, exp_avg_sq, max_exp_avg_sq or None
    SGD = ("sgd", 1)  # momentum_buffer or None
    NESTEROV = ("nesterov", 1)  # momentum_buffer

    @property
    def states(self) -> int:
        return self.value[1]


class Update(NamedTuple):
    """One parameter of a bucket's update; all tensors contiguous and of the parameter's numel."""

    param: Tensor  # bf16, fp16, fp32 or fp64
    grad: Tensor  # any float dtype
    states: tuple[State | None, ...]  # in the order that `Rule` tells
    hyper: Sequence[float]  # AdamHyper or SgdHyper
    out: Tensor | None = None  # where the new parameter goes, of its dtype; None is `param`
    copy: Tensor | None = None  # of another float dtype: takes the new parameter too
    seed: int | None = None  # a bf16 parameter is rounded stochastically with it

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Update:
        """The update of what a function makes of each tensor that there is.

        It is told which one: "param", "grad", "state", "codes", "absmax", "out" or "copy".
        """

        def maybe(name: str, tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(name, tensor)

        def state(value: State | None) -> State | None:
            if isinstance(value, tuple):
                return function("codes", value[0]), function("absmax", value[1])
            return maybe("state", value)

        return self._replace(
            param=function("param", self.param),
            grad=function("grad", self.grad),
            states=tuple(map(state, self.states)),
            out=maybe("out", self.out),
            copy=maybe("copy", self.copy),
        )

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor, with its name as in `map`."""
        found = []

        def note(name: str, tensor: Tensor) -> Tensor:
            found.append((name, tensor))
            return tensor

        self.map(note)
        return found


def adam_hyper(
    group: Mapping[str, Any], step: float | Tensor, scale: float = 1.0
) -> AdamHyper[float]:
    """The columns for the `step`-th step, counted from 1, of a torch.optim Adam or AdamW group."""
    lr = float(group["lr"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    weight_decay = float(group["weight_decay"])
    decoupled = bool(group.get("decoupled_weight_decay", False))
    step = float(step)
    correction = (1 - beta2**step) ** 0.5
    return AdamHyper(
        scale=-scale if group["maximize"] else scale,
        l2=0.0 if decoupled else weight_decay,
        decay=1 - lr * weight_decay if decoupled else 1.0,
        one_minus_beta1=1 - beta1,
        beta2=beta2,
        one_minus_beta2=1 - beta2,
        negative_step_size=-(lr / (1 - beta1**step)) * correction,
        eps=float(group["eps"]) * correction,
    )


def sgd_hyper(group: Mapping[str, Any], first: bool, scale: float = 1.0) -> SgdHyper[float]:
    """The columns for a step of a torch.optim SGD group; `first`: the buffer has no value yet."""
    return SgdHyper(
        scale=-scale if group["maximize"] else scale,
        l2=float(group["weight_decay"]),
        negative_lr=-float(group["lr"]),
        momentum=float(group["momentum"]),
        one_minus_dampening=1 - float(group["dampening"]),
        first=float(first),
    )


def math_dtype(param: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic, and of `hyper`, for parameters of a dtype."""
    return torch.float64 if param == torch.float64 else torch.float32


def adam_(
    param: Tensor,  # (numel,) bf16, fp16, fp32 or fp64
    grad: Tensor,  # (numel,) any float dtype
    exp_avg: State,  # (numel,) any float dtype, or codes and absmax
    exp_avg_sq: State,
    max_exp_avg_sq: State | None,  # AMSGrad
    copy: Tensor | None,  # (numel,) any float dtype
    hyper: Tensor,  # (8,) AdamHyper, fp32; fp64 for an fp64 parameter
    seed: Tensor | int | None = None,  # 0-d int64; rounds a bf16 parameter stochastically
    out: Tensor | None = None,  # (numel,) like `param`, which stays as it is then
) -> None:
    """One step of Adam, AdamW or AMSGrad (torch.optim.adam._single_tensor_adam), in place."""
    math = math_dtype(param.dtype)
    h = AdamHyper(*hyper.to(math).unbind())
    p = param.to(math)
    g = grad.to(math) * h.scale
    g = torch.where(h.l2 != 0, g + h.l2 * p, g)  # 0 * inf is not 0
    p = p * h.decay
    table = tables(param.device) if _any_codes(exp_avg, exp_avg_sq, max_exp_avg_sq) else None
    m = _lerp(_load(exp_avg, math, table, signed=True), g, h.one_minus_beta1)
    v = _load(exp_avg_sq, math, table, signed=False) * h.beta2 + h.one_minus_beta2 * g * g
    v_hat = v
    if max_exp_avg_sq is not None:
        v_hat = torch.maximum(_load(max_exp_avg_sq, math, table, signed=False), v)
    p = p + h.negative_step_size * m / (v_hat.sqrt() + h.eps)
    _store(exp_avg, m, table, signed=True)
    _store(exp_avg_sq, v, table, signed=False)
    if max_exp_avg_sq is not None:
        _store(max_exp_avg_sq, v_hat, table, signed=False)
    _store_param(p, param if out is None else out, copy, seed)


def sgd_(
    param: Tensor,  # (numel,) bf16, fp16, fp32 or fp64
    grad: Tensor,  # (numel,) any float dtype
    momentum_buffer: State | None,  # (numel,) any float dtype, or codes and absmax
    copy: Tensor | None,  # (numel,) any float dtype
    hyper: Tensor,  # (6,) SgdHyper, fp32; fp64 for an fp64 parameter
    seed: Tensor | int | None = None,  # 0-d int64; rounds a bf16 parameter stochastically
    out: Tensor | None = None,  # (numel,) like `param`, which stays as it is then
    *,
    nesterov: bool = False,
) -> None:
    """One step of SGD (torch.optim.sgd._single_tensor_sgd), in place; no buffer: no momentum."""
    math = math_dtype(param.dtype)
    h = SgdHyper(*hyper.to(math).unbind())
    p = param.to(math)
    g = grad.to(math) * h.scale
    g = torch.where(h.l2 != 0, g + h.l2 * p, g)
    direction = g
    if momentum_buffer is not None:
        table = tables(param.device) if _any_codes(momentum_buffer) else None
        old = _load(momentum_buffer, math, table, signed=True)
        m = torch.where(h.first != 0, g, old * h.momentum + h.one_minus_dampening * g)
        direction = g + h.momentum * m if nesterov else m
        _store(momentum_buffer, m, table, signed=True)
    p = p + h.negative_lr * direction
    _store_param(p, param if out is None else out, copy, seed)


def apply(rule: Rule, update: Update) -> None:
    """Run the twin of a rule on one parameter of a bucket."""
    param, grad, states, hyper, out, copy, seed = update
    param, grad = param.detach().view(-1), grad.view(-1)
    flat = [s.view(-1) if isinstance(s, Tensor) else s for s in states]
    out = None if out is None else out.detach().view(-1)
    copy = None if copy is None else copy.detach().view(-1)
    scalars = torch.tensor(tuple(hyper), dtype=math_dtype(param.dtype), device=param.device)
    if rule is Rule.ADAM:
        exp_avg, exp_avg_sq, max_exp_avg_sq = flat
        if exp_avg is None or exp_avg_sq is None:
            raise ValueError("Adam's update got None for exp_avg or exp_avg_sq, needed tensors")
        adam_(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, copy, scalars, seed, out)
    else:
        nesterov = rule is Rule.NESTEROV
        sgd_(param, grad, flat[0], copy, scalars, seed, out, nesterov=nesterov)


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """torch.lerp's formula for small weights, which compiled code would take apart otherwise."""
    return start + weight * (end - start)


def _any_codes(*states: State | None) -> bool:
    return any(isinstance(state, tuple) for state in states)


def _load(state: State, dtype: torch.dtype, table: Tensor | None, *, signed: bool) -> Tensor:
    if isinstance(state, Tensor):
        return state.to(dtype)
    codes, absmax = state
    return dequantize(codes, absmax, signed, dtype, table)


def _store(state: State, values: Tensor, table: Tensor | None, *, signed: bool) -> None:
    if isinstance(state, Tensor):
        state.copy_(values)
        return
    for stored, new in zip(state, quantize(values, signed, table), strict=True):
        stored.copy_(new)


def _store_param(p: Tensor, out: Tensor, copy: Tensor | None, seed: Tensor | int | None) -> None:
    if seed is not None and out.dtype == torch.bfloat16:
        new = round_stochastic(p, seed)
    else:
        new = p.to(out.dtype)
    out.copy_(new)
    if copy is not None:
        copy.copy_(new)


# --- stochastic rounding


def seed_of(torch_seed: int, parameter: int, step: int) -> int:
    """A seed in [0, 2^63) for one parameter's rounding in one step.

    `torch_seed` is `torch.initial_seed()`. The three are mixed by the finalizer of SplitMix64
    (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    mixed = 0
    for part in (torch_seed, parameter, step):
        mixed = (mixed + part + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1


def round_stochastic(
    values: Tensor,  # (numel,) fp32
    seed: Tensor | int,  # 0-d int64
) -> Tensor:
    """bf16 neighbours of the values, the nearer the likelier; NaN and infinities stay."""
    bits = values.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    index = torch.arange(values.numel(), device=values.device)
    noise = (philox(seed, index) & _LOW).to(torch.int32)
    rounded = (torch.where(finite, bits, 0) + noise) & ~_LOW
    return torch.where(finite, rounded.view(torch.float32), values).to(torch.bfloat16)


def philox(
    seed: Tensor | int,  # 0-d int64
    counter: Tensor,  # any shape, int64
) -> Tensor:
    """The first word of Philox-4x32-10, int64 in [0, 2^32), of the counter's shape."""
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    c0, c1 = counter & _WORD, (counter >> 32) & _WORD
    c2 = c3 = torch.zeros_like(counter)
    for _ in range(10):
        high2, low2 = _multiply(c2, 0xCD9E8D57)
        high0, low0 = _multiply(c0, 0xD2511F53)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return c0


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of a product of 32-bit words, with no intermediate above 2^63."""
    low = x * (factor & _LOW)
    high = x * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & _LOW) << 16) | (low & _LOW)
