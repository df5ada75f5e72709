"""Rounding of new values to the dtype of memory: to nearest, or stochastically to bf16.

    bf16(x) = upper 16 bits of (bits(x) + (Philox(seed, index) mod 2^16)),   NaN, inf as they are

The generator is Philox-4x32-10 (Salmon et al., 2011), its word that of `tl.randint(seed, index)`;
the twin is `round_stochastic` in runtime/optim/stochastic.py ([Note: stochastic rounding]).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_stochastic(x, seed, index):
    """bf16 neighbours of fp32 values, of any shape; seed: int64; index: int64, of that shape."""
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    zero = low * 0
    # Not tl.randint: what that does with the upper half of an index is its version's choice.
    noise, _, _, _ = tl.philox(seed, low, high, zero, zero)
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = (bits + (noise & 0xFFFF)) & 0xFFFF0000
    return tl.where(finite, rounded, bits).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def round_nearest(x, DTYPE: tl.constexpr):
    """x in DTYPE, a tie to even."""
    if DTYPE == tl.bfloat16:
        # In integers, because Triton's interpreter truncates in a cast to bf16.
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(finite, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def round_to(x, seed, index, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """x in DTYPE; stochastically only where STOCHASTIC and DTYPE is bf16."""
    if STOCHASTIC and DTYPE == tl.bfloat16:
        return round_stochastic(x, seed, index)
    else:
        return round_nearest(x, DTYPE)
