"""A rule's update of one parameter in plain torch, in place; the reference for the kernels.

The code is pointwise on flat tensors, and its scalars are data. So one
`torch.compile(function_of(rule), dynamic=True, fullgraph=True)` serves every step and size.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megacompile.runtime.optim.blockwise import BLOCK, dequantize, quantize, tables
from megacompile.runtime.optim.rule import OptimizerRule, State, Update, math_dtype
from megacompile.runtime.optim.stochastic import round_stochastic

CHUNK = 2**18  # elements per chunk of an eager twin; a multiple of the 8-bit block


@functools.cache
def function_of(rule: OptimizerRule) -> Callable[..., None]:
    """The function that runs one step of a rule on flat tensors, in place. Its arguments:

    param   (numel,) bf16, fp16, fp32 or fp64
    grad    (numel,) any float dtype
    states  a tuple; each is (numel,) of any float dtype, or (codes, absmax), or None
    copy    (numel,) any float dtype, or None; a second destination of the new parameter
    hyper   (columns,) `OptimizerRule.hyper`, fp32; fp64 for an fp64 parameter
    seed    0-d int64, or None; rounds a bf16 parameter stochastically
    out     (numel,) like `param`, or None; the new parameter goes there and `param` stays
    first   index of the first element in the whole parameter, for the seed
    table   `blockwise.tables`, for codes; None: looked up. Compiled code must get it as an
            argument: Dynamo names constants by a counter of the process, and the names would enter
            the caches' keys
    """
    twin, signs = rule.twin, tuple(moment.signed for moment in rule.moments)

    def step(
        param: Tensor,
        grad: Tensor,
        states: tuple[State | None, ...],
        copy: Tensor | None,
        hyper: Tensor,
        seed: Tensor | int | None = None,
        out: Tensor | None = None,
        first: int = 0,
        table: Tensor | None = None,
    ) -> None:
        math = math_dtype(param.dtype)
        scale, *scalars = hyper.to(math).unbind()
        present = [
            (state, sign) for state, sign in zip(states, signs, strict=True) if state is not None
        ]
        if table is None and has_codes(states):
            table = tables(param.device)
        old = tuple([_load(state, math, table, signed=sign) for state, sign in present])
        p, new = twin(param.to(math), grad.to(math) * scale, old, scalars)
        for (state, sign), values in zip(present, new, strict=True):
            _store(state, values, table, signed=sign)
        _store_param(p, param if out is None else out, copy, seed, first)

    # a code object per rule: Dynamo counts recompilations per code object
    code = step.__code__.replace(co_name=f"{rule.name}_")
    return types.FunctionType(code, globals(), code.co_name, step.__defaults__, step.__closure__)


def apply(rule: OptimizerRule, update: Update) -> None:
    """Run the twin of a rule on one parameter of a bucket, chunk by chunk.

    A chunk's temporaries fit into the CPU's caches and take negligible memory. The results are
    bitwise those of the compiled twin.
    """
    for moment, state in zip(rule.moments, update.states, strict=True):
        if state is None and moment.option is None:
            raise ValueError(f"{rule.name}: the update got None for {moment.name}, needed a tensor")
    whole = update.map(lambda _, tensor: tensor.detach().view(-1))
    numel = whole.param.numel()
    dtype = math_dtype(whole.param.dtype)
    scalars = torch.tensor(tuple(update.hyper), dtype=dtype, device=whole.param.device)
    step = function_of(rule)
    for first in range(0, numel, CHUNK):
        part = whole if numel <= CHUNK else _part(whole, first, min(first + CHUNK, numel))
        grad = part.grad if part.factor is None else part.grad * part.factor
        step(part.param, grad, part.states, part.copy, scalars, part.seed, part.out, first)


def _part(whole: Update, first: int, end: int) -> Update:
    """Elements [first, end) of an update; `first` is a multiple of `BLOCK`."""

    def part(name: str, tensor: Tensor) -> Tensor:
        if name == "absmax":
            return tensor[first // BLOCK : -(-end // BLOCK)]
        return tensor[first:end]

    return whole.map(part)


def has_codes(states: Iterable[State | None]) -> bool:
    """True if any of the states is in 8 bits."""
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


def _store_param(
    p: Tensor, out: Tensor, copy: Tensor | None, seed: Tensor | int | None, first: int
) -> None:
    if seed is not None and out.dtype == torch.bfloat16:
        new = round_stochastic(p, seed, first)
    else:
        new = p.to(out.dtype)
    out.copy_(new)
    if copy is not None:
        copy.copy_(new)


def arguments(update: Update) -> tuple[Any, ...]:
    """The arguments of `function_of` for a flat update on the host, whose factor is in `hyper`."""
    assert update.factor is None
    scalars = torch.tensor(tuple(update.hyper), dtype=math_dtype(update.param.dtype))
    seed = None if update.seed is None else torch.tensor(update.seed)
    table = tables(update.param.device) if has_codes(update.states) else None
    return (update.param, update.grad, update.states, update.copy, scalars, seed, None, 0, table)


# A correctly rounded square root on every device.
#
# On x86 CPUs torch calls MKL's root, which may be off in the last bit. Compiled C++ and the kernels
# use the processor's, which is correctly rounded, so eager twins must be too.

_SPLIT = 2.0**27 + 1  # splits the 53 bits of a number into two halves
_TINY = 2.0**-500  # below it, the error of a square is subnormal


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of each element: fp32 or fp64, not negative."""
    if torch.compiler.is_dynamo_compiling() or x.device.type != "cpu":
        return x.sqrt()
    if x.dtype == torch.float32:  # an fp64 root rounds to the right fp32: none is near a midpoint
        return x.double().sqrt().float()
    return _of_doubles(x)


def _of_doubles(x: Tensor) -> Tensor:
    """One Newton step from a root that is off by at most one bit, with the exact error of its
    square.

    Correctly rounded except for roots within 2^-106 of the midpoint of two numbers, such as the
    root of 1 - 2^-53.

    Source of the exact product: Dekker, "A floating-point technique for extending the available
    precision", 1971.
    """
    tiny = x < _TINY
    x = torch.where(tiny, x * 2.0**512, x)
    root = x.sqrt()
    high = root * _SPLIT
    high = high - (high - root)
    low = root - high
    square = root * root
    error = ((high * high - square) + 2 * high * low) + low * low
    step = ((x - square) - error) / (2 * root)
    root = torch.where(step.isfinite(), root + step, root)  # not finite for 0, infinity and NaN
    return torch.where(tiny, root * 2.0**-256, root)
