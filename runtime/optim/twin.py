"""A rule in plain torch on one parameter, in place: what the kernels are tested against.

It is pure pointwise code on flat tensors, with its scalars as data, so that one
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

CHUNK = 2**18  # elements that a twin which is not compiled works on at once; whole blocks


@functools.cache
def function_of(rule: OptimizerRule) -> Callable[..., None]:
    """One step of a rule on flat tensors, in place. Its arguments:

    param   (numel,) bf16, fp16, fp32 or fp64
    grad    (numel,) any float dtype
    states  a tuple, each (numel,) of any float dtype, or codes and absmax, or None
    copy    (numel,) any float dtype, or None: takes the new parameter too
    hyper   (columns,) `OptimizerRule.hyper`, fp32; fp64 for an fp64 parameter
    seed    0-d int64, or None: rounds a bf16 parameter stochastically
    out     (numel,) like `param`, which stays as it is then, or None
    first   the place of the first element in the whole parameter, for the seed
    table   `blockwise.tables`, for codes; None: it is fetched. Compiled code takes it: a constant
            is named by how much Dynamo has done in the process, and so are the keys of caches
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
        there = [
            (state, sign) for state, sign in zip(states, signs, strict=True) if state is not None
        ]
        if table is None and has_codes(states):
            table = tables(param.device)
        old = tuple([_load(state, math, table, signed=sign) for state, sign in there])
        p, new = twin(param.to(math), grad.to(math) * scale, old, scalars)
        for (state, sign), values in zip(there, new, strict=True):
            _store(state, values, table, signed=sign)
        _store_param(p, param if out is None else out, copy, seed, first)

    # a code object of its own: Dynamo counts recompilations by it, and rules do not share them
    code = step.__code__.replace(co_name=f"{rule.name}_")
    return types.FunctionType(code, globals(), code.co_name, step.__defaults__, step.__closure__)


def apply(rule: OptimizerRule, update: Update) -> None:
    """Run the twin of a rule on one parameter of a bucket, chunk by chunk.

    What a chunk needs in between stays in the caches, and takes no memory worth counting. The
    numbers are those of the compiled twin, in every bit.
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
    """Some elements of an update, from the first of a block on."""

    def part(name: str, tensor: Tensor) -> Tensor:
        if name == "absmax":
            return tensor[first // BLOCK : -(-end // BLOCK)]
        return tensor[first:end]

    return whole.map(part)


def has_codes(states: Iterable[State | None]) -> bool:
    """True if any of an update's states is in 8 bits."""
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
    """A flat update as `function_of` takes it: one on the host, whose factor is in `hyper`."""
    assert update.factor is None
    scalars = torch.tensor(tuple(update.hyper), dtype=math_dtype(update.param.dtype))
    seed = None if update.seed is None else torch.tensor(update.seed)
    table = tables(update.param.device) if has_codes(update.states) else None
    return (update.param, update.grad, update.states, update.copy, scalars, seed, None, 0, table)


# A square root that is rounded correctly wherever it runs.
#
# torch's own on the CPU is MKL's on x86, which may be off in the last bit. Compiled C++ and the
# kernels use the processor's, which is right; so twins that run as they are must be right too.

_SPLIT = 2.0**27 + 1  # divides the 53 bits of a number into two halves
_TINY = 2.0**-500  # below it, the error of a square is no normal number


def sqrt(x: Tensor) -> Tensor:
    """The number nearest to the root of each element: fp32 or fp64, of at least 0."""
    if torch.compiler.is_dynamo_compiling() or x.device.type != "cpu":
        return x.sqrt()
    if x.dtype == torch.float32:  # no root of 24 bits is near enough to the middle of two numbers
        return x.double().sqrt().float()
    return _of_doubles(x)


def _of_doubles(x: Tensor) -> Tensor:
    """One step of Newton from a root that is off by one bit, with the error of its square exact.

    Right but for roots within 2^-106 of the middle of two numbers, such as that of 1 - 2^-53.

    Source of the product without an error: Dekker, "A floating-point technique for extending the
    available precision", 1971.
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
    root = torch.where(step.isfinite(), root + step, root)  # not of 0, infinity and NaN
    return torch.where(tiny, root * 2.0**-256, root)
