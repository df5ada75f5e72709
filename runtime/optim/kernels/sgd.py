"""SGD, with momentum and Nesterov's variant of it, on all parameters of a bucket.

    g = scale * grad + l2 * p
    m = g on the first step, then momentum * m + (1 - dampening) * g
    p = p - lr * d,   d = m, or g + momentum * m (Nesterov), or g (no momentum)

Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013,
in the form and the order of operations of torch.optim.sgd. Twin: `rules.sgd_`.
Each of gradient, parameter and momentum is read once; parameter, copy and momentum written once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from megacompile.runtime.optim.kernels import table as layout
from megacompile.runtime.optim.kernels.blockwise import load, load_state, pointers, store_state
from megacompile.runtime.optim.kernels.launch import BLOCK, launch
from megacompile.runtime.optim.kernels.rounding import round_nearest, round_to
from megacompile.runtime.optim.rules import Rule, SgdHyper, Update

_PARAM = tl.constexpr(layout.PARAM)
_OUT = tl.constexpr(layout.OUT)
_COPY = tl.constexpr(layout.COPY)
_GRAD = tl.constexpr(layout.GRAD)
_M = tl.constexpr(layout.STATES)
_M_ABSMAX = tl.constexpr(layout.STATES + 1)
_SEED = tl.constexpr(layout.STATES + 2)
_COLUMNS = tl.constexpr(layout.STATES + 3)

_HYPERS = tl.constexpr(len(SgdHyper._fields))
_SCALE = tl.constexpr(SgdHyper._fields.index("scale"))
_L2 = tl.constexpr(SgdHyper._fields.index("l2"))
_NEGATIVE_LR = tl.constexpr(SgdHyper._fields.index("negative_lr"))
_MOMENTUM = tl.constexpr(SgdHyper._fields.index("momentum"))
_ONE_MINUS_DAMPENING = tl.constexpr(SgdHyper._fields.index("one_minus_dampening"))
_FIRST = tl.constexpr(SgdHyper._fields.index("first"))


def sgd_bucket(updates: Sequence[Update], *, nesterov: bool = False, block: int = BLOCK) -> None:
    """One step for the parameters of a bucket, in place; states as in `Rule.SGD`.

    `block` elements, a multiple of 256 by a power of two, go to a program.
    """
    launch(_sgd, updates, states=Rule.SGD.states, block=block, NESTEROV=nesterov)


@triton.jit
def _sgd(
    blocks,
    table,
    hyper,
    maps,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    STATE0: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    NESTEROV: tl.constexpr,
):
    MATH: tl.constexpr = hyper.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(blocks + 2 * program).to(tl.int64)
    tile = tl.load(blocks + 2 * program + 1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = tile[:, None] * 256 + tl.arange(0, 256)[None, :]
    table += row * _COLUMNS
    hyper += row * _HYPERS
    numel = tl.load(table)
    if ALIGNED:  # a vector lies within the tensor or beyond it
        numel = tl.multiple_of(numel, 16)
    mask = index < numel

    p = load(table, _PARAM, index, mask, PARAM, MATH, ALIGNED)
    g = load(table, _GRAD, index, mask, GRAD, MATH, ALIGNED) * tl.load(hyper + _SCALE)
    l2 = tl.load(hyper + _L2)
    g = tl.where(l2 != 0, g + l2 * p, g)
    direction = g
    if STATE0 is not None:
        m = load_state(table, _M, _M_ABSMAX, tile, index, mask, maps, 1, STATE0, MATH, ALIGNED)
        momentum = tl.load(hyper + _MOMENTUM)
        later = m * momentum + tl.load(hyper + _ONE_MINUS_DAMPENING) * g
        m = tl.where(tl.load(hyper + _FIRST) != 0, g, later)
        store_state(table, _M, _M_ABSMAX, tile, index, mask, maps, m, 1, STATE0, ALIGNED)
        if NESTEROV:
            direction = g + momentum * m
        else:
            direction = m
    p = p + tl.load(hyper + _NEGATIVE_LR) * direction
    new = round_to(p, tl.load(table + _SEED), index, PARAM, STOCHASTIC)
    tl.store(pointers(table, _OUT, index, PARAM, ALIGNED), new, mask=mask)
    if COPY is not None:
        low = round_nearest(new, COPY)
        tl.store(pointers(table, _COPY, index, COPY, ALIGNED), low, mask=mask)
