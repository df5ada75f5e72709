"""The update kernel of all rules: one launch for a bucket's parameters of the same signature.

    g = scale * (factor * grad);   p, states = rule(p, g, states, scalars)

Gradient, parameter and states are read once; parameter, copy and states are written once. The
rule's arithmetic (`OptimizerRule.kernel`) is inlined. The twin is `runtime/optim/twin.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megacompile.runtime.optim import blockwise
from megacompile.runtime.optim.kernels import table as layout
from megacompile.runtime.optim.kernels.load_store import (
    load,
    load_state,
    pointers,
    round_nearest,
    round_to,
    store_state,
)
from megacompile.runtime.optim.kernels.table import Launch, Signature, launches
from megacompile.runtime.optim.rule import OptimizerRule, Update

BLOCK = 1024  # elements per program; 2048 and 4096 are slower on an H200
_WARPS = 8

_PARAM = tl.constexpr(layout.PARAM)
_OUT = tl.constexpr(layout.OUT)
_COPY = tl.constexpr(layout.COPY)
_GRAD = tl.constexpr(layout.GRAD)
_STATE0 = tl.constexpr(layout.STATES)


def launch(rule: OptimizerRule, updates: Sequence[Update], *, block: int = BLOCK) -> None:
    """Update the parameters of a bucket in place on the gradients' device.

    `block` is the number of elements per program: 256 times a power of two. Raises ValueError for a
    tensor that is not contiguous or has the wrong size or dtype.
    """
    if updates:
        run(rule, launches(rule, updates, block=block), updates[0].grad.device, block=block)


def run(
    rule: OptimizerRule, each: Iterable[Launch], device: torch.device, *, block: int = BLOCK
) -> None:
    """Launch the kernel of a rule."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        maps = blockwise.tables(device)
        for signature, blocks, table, hyper in each:
            _update[(len(blocks),)](
                blocks,
                table,
                hyper,
                maps,
                ROWS=block // blockwise.BLOCK,
                HYPERS=hyper.shape[1],
                num_warps=_WARPS,
                enable_fp_fusion=False,  # twins round each product; memory is the bottleneck anyway
                **constants(rule, signature),
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
        "SCALED": signature.scaled,
    }


def _in_triton(dtype: torch.dtype | None) -> Any:
    return None if dtype is None else getattr(tl, str(dtype).removeprefix("torch."))


@functools.cache
def _jitted(rule: OptimizerRule) -> Any:
    plain: Any = rule.kernel
    names = {**plain.__globals__, "tl": tl}
    return triton.jit(types.FunctionType(plain.__code__, names, plain.__name__))


@triton.jit
def load_gradient(
    table,
    FACTOR: tl.constexpr,  # its column
    index,
    mask,
    GRAD: tl.constexpr,
    MATH: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """A tile of the gradient in MATH, multiplied by its factor if SCALED, rounded as by `mul_`."""
    if not SCALED:
        return load(table, _GRAD, index, mask, GRAD, MATH, ALIGNED)
    else:
        WIDE: tl.constexpr = tl.float64 if GRAD == tl.float64 else tl.float32
        factor = tl.load(tl.load(table + FACTOR).to(tl.pointer_type(GRAD))).to(WIDE)
        product = load(table, _GRAD, index, mask, GRAD, WIDE, ALIGNED) * factor
        return round_nearest(product, GRAD).to(MATH)


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
    SCALED: tl.constexpr,
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
    FACTOR: tl.constexpr = SEED + 1
    table += row * (FACTOR + 1)
    hyper += row * HYPERS
    numel = tl.load(table)
    if ALIGNED:  # a vector load never crosses the tensor's end
        numel = tl.multiple_of(numel, 16)
    mask = index < numel

    p = load(table, _PARAM, index, mask, PARAM, MATH, ALIGNED)
    g = load_gradient(table, FACTOR, index, mask, GRAD, MATH, ALIGNED, SCALED) * tl.load(hyper)
    states = ()
    for i in tl.static_range(len(STATES)):
        if STATES[i] is not None:
            state = load_state(
                table,
                _STATE0 + i,
                ABSMAX0 + i,
                tile,
                index,
                mask,
                maps,
                SIGNED[i],
                STATES[i],
                MATH,
                ALIGNED,
            )
            states = states + (state,)
    scalars = ()
    for i in tl.static_range(1, HYPERS):
        scalars = scalars + (tl.load(hyper + i),)

    p, states = RULE(p, g, states, scalars)

    for i in tl.static_range(len(STATES)):
        if STATES[i] is not None:
            store_state(
                table,
                _STATE0 + i,
                ABSMAX0 + i,
                tile,
                index,
                mask,
                maps,
                states[i],
                SIGNED[i],
                STATES[i],
                ALIGNED,
            )
    new = round_to(p, tl.load(table + SEED), index, PARAM, STOCHASTIC)
    tl.store(pointers(table, _OUT, index, PARAM, ALIGNED), new, mask=mask)
    if COPY is not None:
        low = round_nearest(new, COPY)
        tl.store(pointers(table, _COPY, index, COPY, ALIGNED), low, mask=mask)
