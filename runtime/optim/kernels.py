"""The update kernel of all rules: one launch for a bucket's parameters of the same signature.

    g = scale * grad;   p, states = rule(p, g, states, scalars)

The rule's arithmetic is inlined. A tile is (ROWS, 256); a row is one
quantization block. New values are rounded to the dtype in memory: to nearest, or stochastically to
bf16. The twins, with the sources, are in `twin.py` (`round_stochastic`) and `blockwise.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from megacompile.host_memory import pinned_empty
from megacompile.runtime.optim import blockwise
from megacompile.runtime.optim import rule as layout
from megacompile.runtime.optim.rule import (
    PROGRAM_NUMEL,
    Launch,
    OptimizerRule,
    Signature,
)

_WARPS = 8

_PARAM = tl.constexpr(layout.PARAM)
_OUT = tl.constexpr(layout.OUT)
_COPY = tl.constexpr(layout.COPY)
_GRAD = tl.constexpr(layout.GRAD)
_STATE0 = tl.constexpr(layout.STATES)
_ROW = tl.constexpr(blockwise.BLOCK)
_TABLE = tl.constexpr(blockwise.TABLE_NUMEL)
_MIDPOINTS = tl.constexpr(256)
_GUESSES = tl.constexpr(512)
_SMALLEST = tl.constexpr(blockwise.SMALLEST)


def run(
    rule: OptimizerRule, each: Iterable[Launch], device: torch.device, *, block: int = PROGRAM_NUMEL
) -> None:
    """Launch the kernel of a rule, which updates parameters of a bucket in place. `block` is the
    number of elements per program: 256 times a power of two."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for one in each:
            maps = blockwise.tables(device) if torch.uint8 in one.signature.states else None
            at_once = device.type == "cpu"  # Triton's interpreter
            table, hyper = one.split(one.packed if at_once else fetch(one.packed, device))
            _update[(len(one.blocks),)](
                one.blocks,
                table,
                hyper,
                maps,
                ROWS=block // blockwise.BLOCK,
                HYPERS=hyper.shape[1],
                num_warps=_WARPS,
                enable_fp_fusion=False,  # twins round each product; memory is the bottleneck anyway
                **constants(rule, one.signature),
            )


def constants(rule: OptimizerRule, signature: Signature) -> dict[str, Any]:
    """The constant arguments that depend on the rule and the signature, not on the launch."""
    return {
        "RULE": _jitted(rule),
        "STATES": tuple(map(_in_triton, signature.states)),
        "SIGNED": tuple(int(moment.signed) for moment in rule.moments),
        "PARAM": _in_triton(signature.param),
        "GRAD": _in_triton(signature.grad),
        "COPY": _in_triton(signature.copy),
        "STOCHASTIC": signature.stochastic,
        "ALIGNED": signature.aligned,
    }


def _in_triton(dtype: torch.dtype | None) -> Any:
    return None if dtype is None else getattr(tl, str(dtype).removeprefix("torch."))


@functools.cache
def _jitted(rule: OptimizerRule) -> Any:
    plain: Any = rule.arithmetic
    names = {**plain.__globals__, "tl": tl}
    return triton.jit(types.FunctionType(plain.__code__, names, plain.__name__))


@triton.jit
def round_stochastic(x, seed, index):
    """Round fp32 values of any shape to bf16 neighbours; seed: int64; index: int64, same shape."""
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    zero = low * 0
    # Not tl.randint: its treatment of an index's upper half depends on Triton's version.
    noise, _, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (bits + (noise & 0xFFFF)) & 0xFFFF0000
    return tl.where(finite, rounded, bits).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def round_nearest(x, DTYPE: tl.constexpr):
    """Round x to DTYPE, ties to even."""
    if DTYPE == tl.bfloat16:
        # In integers, because Triton's interpreter truncates in a cast to bf16.
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(finite, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def pointers(table, COLUMN: tl.constexpr, index, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Addresses of elements of the tensor in a column."""
    where = tl.load(table + COLUMN).to(tl.pointer_type(DTYPE)) + index
    if ALIGNED:  # without this hint each element is a separate load
        where = tl.multiple_of(where, [16, 16])
    return where


@triton.jit
def load(
    table,
    COLUMN: tl.constexpr,
    index,
    mask,
    DTYPE: tl.constexpr,
    MATH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A tile of a tensor, converted to MATH; zeros after the tensor's end."""
    where = pointers(table, COLUMN, index, DTYPE, ALIGNED)
    return tl.load(where, mask=mask, other=0).to(MATH)


@triton.jit
def load_state(
    table,
    COLUMN: tl.constexpr,  # of the state or its codes
    ABSMAX: tl.constexpr,  # column of its absmax
    at,  # (ROWS,) int64, row numbers; (ROWS, 256) int64, element numbers; (ROWS, 256) mask
    maps,  # blockwise.tables
    SIGNED: tl.constexpr,
    DTYPE: tl.constexpr,  # uint8 for 8-bit states
    MATH: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A tile of a state, converted to MATH; zeros after the state's end."""
    tile, index, mask = at
    if DTYPE == tl.uint8:
        codes = load(table, COLUMN, index, mask, tl.uint8, tl.int32, ALIGNED)
        numel = tl.load(table)
        absmax = tl.load(table + ABSMAX).to(tl.pointer_type(tl.float32)) + tile
        largest = tl.load(absmax, mask=tile * _ROW < numel, other=0.0)
        values = tl.load(maps + SIGNED * _TABLE + codes) * largest[:, None]
        return tl.where(mask, values, 0.0).to(MATH)
    else:
        return load(table, COLUMN, index, mask, DTYPE, MATH, ALIGNED)


@triton.jit
def store_state(
    table,
    COLUMN: tl.constexpr,
    ABSMAX: tl.constexpr,
    at,
    maps,
    values,  # (ROWS, 256) the arithmetic's dtype
    SIGNED: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store a tile of a state; arguments as in `load_state`."""
    tile, index, mask = at
    where = pointers(table, COLUMN, index, DTYPE, ALIGNED)
    if DTYPE == tl.uint8:
        values = tl.where(mask, values.to(tl.float32), 0.0)
        largest = tl.max(tl.abs(values), axis=1)
        # tl.max ignores NaN, but a NaN makes the whole block NaN.
        nans = tl.max((values != values).to(tl.int32), axis=1)
        bad = (nans > 0) | (largest == float("inf"))
        largest = tl.where(bad, float("nan"), largest)
        largest = tl.where(largest < _SMALLEST, 0.0, largest)
        divisor = tl.where(largest == 0.0, 1.0, largest)
        scaled = tl.div_rn(values, tl.broadcast_to(divisor[:, None], values.shape))
        maps += SIGNED * _TABLE
        cell = (scaled.to(tl.uint32, bitcast=True) >> 16).to(tl.int32)
        guess = tl.load(maps + _GUESSES + cell).to(tl.int32)
        codes = guess + (scaled > tl.load(maps + _MIDPOINTS + guess)).to(tl.int32)
        tl.store(where, codes.to(tl.uint8), mask=mask)
        absmax = tl.load(table + ABSMAX).to(tl.pointer_type(tl.float32)) + tile
        tl.store(absmax, largest, mask=tile * _ROW < tl.load(table))
    else:
        tl.store(where, round_nearest(values, DTYPE), mask=mask)


@triton.jit
def _update(
    blocks,
    table,
    hyper,
    maps,
    RULE: tl.constexpr,
    STATES: tl.constexpr,  # the dtype of each, or None
    SIGNED: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    HYPERS: tl.constexpr,
):
    MATH: tl.constexpr = hyper.dtype.element_ty
    ABSMAX0: tl.constexpr = _STATE0 + len(STATES)
    SEED: tl.constexpr = _STATE0 + 2 * len(STATES)
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(blocks + 2 * program).to(tl.int64)
    tile = tl.load(blocks + 2 * program + 1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = tile[:, None] * 256 + tl.arange(0, 256)[None, :]
    table += row * (SEED + 1)
    hyper += row * HYPERS
    numel = tl.load(table)
    if ALIGNED:  # a vector load never crosses the tensor's end
        numel = tl.multiple_of(numel, 16)
    mask = index < numel

    p = load(table, _PARAM, index, mask, PARAM, MATH, ALIGNED)
    g = load(table, _GRAD, index, mask, GRAD, MATH, ALIGNED) * tl.load(hyper)
    at = (tile, index, mask)
    states = ()
    for i in tl.static_range(len(STATES)):
        if STATES[i] is not None:
            state = load_state(
                table, _STATE0 + i, ABSMAX0 + i, at, maps, SIGNED[i], STATES[i], MATH, ALIGNED
            )
            states = states + (state,)
    scalars = ()
    for i in tl.static_range(1, HYPERS):
        scalars = scalars + (tl.load(hyper + i),)

    p, states = RULE(p, g, states, scalars)

    for i in tl.static_range(len(STATES)):
        if STATES[i] is not None:
            store_state(
                table, _STATE0 + i, ABSMAX0 + i, at, maps, states[i], SIGNED[i], STATES[i], ALIGNED
            )
    if STOCHASTIC and PARAM == tl.bfloat16:
        new = round_stochastic(p, tl.load(table + SEED), index)
    else:
        new = round_nearest(p, PARAM)
    tl.store(pointers(table, _OUT, index, PARAM, ALIGNED), new, mask=mask)
    if COPY is not None:
        low = round_nearest(new, COPY)
        tl.store(pointers(table, _COPY, index, COPY, ALIGNED), low, mask=mask)


# Copies a small host tensor to the device with a kernel that reads page-locked memory.
#
# The copy engine serves requests in order: a table of 2 KB waited 100 ms for the gigabytes of
# states and weights before it. A kernel reads across the bus without the copy engine.

_FETCHED = 1024

_in_use: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # until the kernel has read them


def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `host`, (numel,) int64, to a CUDA device on its current stream."""
    _drop_read()
    pinned = pinned_empty((host.numel(),), torch.int64).copy_(host)
    target = torch.empty(host.numel(), dtype=torch.int64, device=device)
    if not pinned.is_pinned():  # the system is out of page-locked memory
        return target.copy_(host)
    grid = (triton.cdiv(host.numel(), _FETCHED),)
    _fetch[grid](pinned.data_ptr(), target, host.numel(), BLOCK=_FETCHED)
    event = torch.cuda.Event()
    event.record()
    _in_use.append((pinned, event))
    return target


def _drop_read() -> None:
    """Free the buffers that kernels have read. Thread-safe: popping an entry claims it."""
    with contextlib.suppress(IndexError):  # it is empty
        while True:
            first = _in_use.popleft()
            if not first[1].query():
                _in_use.appendleft(first)
                return


@triton.jit(do_not_specialize=["source", "numel"])
def _fetch(source, target, numel, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    address = source.to(tl.int64).to(tl.pointer_type(tl.int64), bitcast=False)
    tl.store(target + index, tl.load(address + index, mask=mask), mask=mask)
