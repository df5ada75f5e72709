"""Adam, AdamW and AMSGrad on all parameters of a bucket.

    g = scale * grad + l2 * p                 p = decay * p
    m = lerp(m, g, 1 - beta1)                 v = beta2 * v + (1 - beta2) * g^2
    p = p - step_size * m / (sqrt(v or max(v)) + eps)

where step_size and eps hold the bias corrections (`rules.AdamHyper`).

Sources: Kingma & Ba, 2015, arXiv 1412.6980; Loshchilov & Hutter, 2019, arXiv 1711.05101; Reddi et
al., 2018, arXiv 1904.09237; the order of operations is torch.optim.adam's. Twin: `rules.adam_`.
Each of gradient, parameter and states is read once; parameter, copy and states are written once.
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
from megacompile.runtime.optim.rules import AdamHyper, Rule, Update

_PARAM = tl.constexpr(layout.PARAM)
_OUT = tl.constexpr(layout.OUT)
_COPY = tl.constexpr(layout.COPY)
_GRAD = tl.constexpr(layout.GRAD)
_M = tl.constexpr(layout.STATES)
_V = tl.constexpr(layout.STATES + 1)
_V_MAX = tl.constexpr(layout.STATES + 2)
_M_ABSMAX = tl.constexpr(layout.STATES + 3)
_V_ABSMAX = tl.constexpr(layout.STATES + 4)
_V_MAX_ABSMAX = tl.constexpr(layout.STATES + 5)
_SEED = tl.constexpr(layout.STATES + 6)
_COLUMNS = tl.constexpr(layout.STATES + 7)

_HYPERS = tl.constexpr(len(AdamHyper._fields))
_SCALE = tl.constexpr(AdamHyper._fields.index("scale"))
_L2 = tl.constexpr(AdamHyper._fields.index("l2"))
_DECAY = tl.constexpr(AdamHyper._fields.index("decay"))
_ONE_MINUS_BETA1 = tl.constexpr(AdamHyper._fields.index("one_minus_beta1"))
_BETA2 = tl.constexpr(AdamHyper._fields.index("beta2"))
_ONE_MINUS_BETA2 = tl.constexpr(AdamHyper._fields.index("one_minus_beta2"))
_STEP = tl.constexpr(AdamHyper._fields.index("negative_step_size"))
_EPS = tl.constexpr(AdamHyper._fields.index("eps"))


def adam_bucket(updates: Sequence[Update], *, block: int = BLOCK) -> None:
    """One step for the parameters of a bucket, in place; states as in `Rule.ADAM`.

    `block` elements, a multiple of 256 by a power of two, go to a program.
    """
    for i, update in enumerate(updates):
        if update.states[0] is None or update.states[1] is None:
            raise ValueError(f"parameter {i} has no exp_avg or exp_avg_sq, needed both")
    launch(_adam, updates, states=Rule.ADAM.states, block=block)


@triton.jit
def _adam(
    blocks,
    table,
    hyper,
    maps,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    STATE0: tl.constexpr,
    STATE1: tl.constexpr,
    STATE2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
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
    m = load_state(table, _M, _M_ABSMAX, tile, index, mask, maps, 1, STATE0, MATH, ALIGNED)
    v = load_state(table, _V, _V_ABSMAX, tile, index, mask, maps, 0, STATE1, MATH, ALIGNED)

    l2 = tl.load(hyper + _L2)
    g = tl.where(l2 != 0, g + l2 * p, g)  # 0 * inf is not 0
    p = p * tl.load(hyper + _DECAY)
    m = m + tl.load(hyper + _ONE_MINUS_BETA1) * (g - m)
    v = v * tl.load(hyper + _BETA2) + tl.load(hyper + _ONE_MINUS_BETA2) * g * g
    v_hat = v
    if STATE2 is not None:
        v_max = load_state(
            table, _V_MAX, _V_MAX_ABSMAX, tile, index, mask, maps, 0, STATE2, MATH, ALIGNED
        )
        v_hat = tl.maximum(v_max, v, propagate_nan=tl.PropagateNan.ALL)
    step = tl.load(hyper + _STEP)
    eps = tl.load(hyper + _EPS)
    if MATH == tl.float32:  # whose plain sqrt and division are approximate
        p = p + tl.div_rn(step * m, tl.sqrt_rn(v_hat) + eps)
    else:
        p = p + step * m / (tl.sqrt(v_hat) + eps)

    store_state(table, _M, _M_ABSMAX, tile, index, mask, maps, m, 1, STATE0, ALIGNED)
    store_state(table, _V, _V_ABSMAX, tile, index, mask, maps, v, 0, STATE1, ALIGNED)
    if STATE2 is not None:
        store_state(
            table, _V_MAX, _V_MAX_ABSMAX, tile, index, mask, maps, v_hat, 0, STATE2, ALIGNED
        )
    new = round_to(p, tl.load(table + _SEED), index, PARAM, STOCHASTIC)
    tl.store(pointers(table, _OUT, index, PARAM, ALIGNED), new, mask=mask)
    if COPY is not None:
        low = round_nearest(new, COPY)
        tl.store(pointers(table, _COPY, index, COPY, ALIGNED), low, mask=mask)
