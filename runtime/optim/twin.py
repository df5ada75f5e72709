"""A rule's update of one parameter in plain torch, in place, the reference for the kernels.

The code is pointwise on flat tensors, and its scalars are data. So one
`torch.compile(function_of(rule), dynamic=True, fullgraph=True)` serves every step and size.
"""

from __future__ import annotations

import functools
import hashlib
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megacompile.runtime.optim.blockwise import dequantize, quantize, tables
from megacompile.runtime.optim.rule import OptimizerRule, State, Update, math_dtype

CHUNK = 2**18  # elements per chunk of an eager twin; a multiple of the 8-bit block


@functools.cache
def function_of(rule: OptimizerRule) -> Callable[..., None]:
    """The function that runs one step of a rule on flat tensors, in place. Its arguments are those
    of `Update`, with the scalars as a tensor (fp32; fp64 for an fp64 parameter), the index of the
    first element in the whole parameter (for the seed), and `blockwise.tables`. Compiled code must
    get the tables as an argument: Dynamo names constants by a counter of the process, and the names
    would enter the caches' keys."""
    arithmetic, signs = rule.arithmetic, tuple(moment.signed for moment in rule.moments)

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
        p, new = arithmetic(param.to(math), grad.to(math) * scale, old, scalars)
        for (state, sign), values in zip(present, new, strict=True):
            _store(state, values, table, signed=sign)
        if seed is not None and param.dtype == torch.bfloat16:
            p = round_stochastic(p, seed, first)
        for target in (param if out is None else out, copy):
            if target is not None:
                target.copy_(p.to(param.dtype))

    # a code object per rule: Dynamo counts recompilations per code object
    code = step.__code__.replace(co_name=f"{rule.name}_")
    return types.FunctionType(code, globals(), code.co_name, step.__defaults__, step.__closure__)


def apply(rule: OptimizerRule, update: Update) -> None:
    """Run the twin of a rule on one parameter of a bucket, chunk by chunk. A chunk's temporaries
    fit into the CPU's caches and take negligible memory. The results are bitwise those of the
    compiled twin."""
    whole = update.map(lambda _, tensor: tensor.detach().view(-1))
    numel = whole.param.numel()
    dtype = math_dtype(whole.param.dtype)
    scalars = torch.tensor(tuple(update.hyper), dtype=dtype, device=whole.param.device)
    step = function_of(rule)
    for first in range(0, numel, CHUNK):
        part = whole if numel <= CHUNK else whole.part(first, min(first + CHUNK, numel))
        step(part.param, part.grad, part.states, part.copy, scalars, part.seed, part.out, first)


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


def arguments(update: Update) -> tuple[Any, ...]:
    """The arguments of `function_of` for a flat update on the host."""
    scalars = torch.tensor(tuple(update.hyper), dtype=math_dtype(update.param.dtype))
    seed = None if update.seed is None else torch.tensor(update.seed)
    table = tables(update.param.device) if has_codes(update.states) else None
    return (update.param, update.grad, update.states, update.copy, scalars, seed, None, 0, table)


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of each element: fp32 or fp64, not negative.

    On x86 CPUs torch calls MKL's root, which may be off in the last bit. Compiled C++ and the
    kernels use the processor's, which is correctly rounded, so eager twins must be too.
    """
    if torch.compiler.is_dynamo_compiling() or x.device.type != "cpu":
        return x.sqrt()
    if x.dtype == torch.float32:  # an fp64 root rounds to the right fp32: none is near a midpoint
        return x.double().sqrt().float()
    roots = [math.sqrt(value) if value >= 0 else math.nan for value in x.tolist()]  # slow, but rare
    return torch.tensor(roots, dtype=x.dtype)


class TorchLanguage:
    """The names of `triton.language` that the arithmetic of rules uses, for tensors."""

    float32 = torch.float32
    where: Any = staticmethod(torch.where)
    sqrt = sqrt_rn = staticmethod(sqrt)
    div_rn: Any = staticmethod(torch.div)


# [Note: stochastic rounding]
# To round fp32 to bf16, add a random 16-bit number to the bit pattern and keep the upper half of
# the sum. The mean over the random numbers is the unrounded value. The random number is the low
# half of the first word of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
# 2, 3", 2011). The counter is the element's index; the key is a seed of the parameter and the step.
# `tl.randint(seed, index)` returns the same word, so the kernel and the twin round bitwise alike.

_WORD = 0xFFFFFFFF  # 32 bits
_LOW = 0xFFFF


def seed_of(torch_seed: int, parameter: int, step: int, shard: int = 0) -> int:
    """A seed in [0, 2^63) for one parameter's rounding in one step. `torch_seed` is
    `torch.initial_seed()`. Element indices start at 0 in each shard, so each shard needs its own
    seed; the first shard has the seed of a whole parameter."""
    text = f"{torch_seed} {parameter} {step} {shard}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def round_stochastic(
    values: Tensor,  # (numel,) fp32
    seed: Tensor | int,  # 0-d int64
    first: int = 0,  # index of the first value in the parameter
) -> Tensor:
    """Round values to one of their bf16 neighbours, the nearer with the higher probability. NaN and
    infinities stay."""
    bits = values.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    index = torch.arange(first, first + values.numel(), device=values.device)
    noise = (philox(seed, index) & _LOW).to(torch.int32)
    rounded = (torch.where(finite, bits, 0) + noise) & ~_LOW
    return torch.where(finite, rounded.view(torch.float32), values).to(torch.bfloat16)


def philox(
    seed: Tensor | int,  # 0-d int64
    counter: Tensor,  # any shape, int64
) -> Tensor:
    """The first word of Philox-4x32-10: int64 in [0, 2^32), shaped like the counter."""
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
