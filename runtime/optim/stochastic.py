"""Stochastic rounding of new parameters to bf16, and its seeds.

[Note: stochastic rounding]
To round fp32 to bf16, add a random 16-bit number to the bit pattern and keep the upper half of the
sum. The mean over the random numbers is the unrounded value. The random number is the low half of
the first word of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011). The counter is the element's index; the key is a seed for the parameter and the step.
`tl.randint(seed, index)` returns the same word, so the kernel and the twin round bitwise alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF  # 32 bits
_LOW = 0xFFFF


def seed_of(torch_seed: int, parameter: int, step: int, shard: int = 0) -> int:
    """A seed in [0, 2^63) for one parameter's rounding in one step.

    `torch_seed` is `torch.initial_seed()`. Element indices start at 0 in each shard, so each shard
    needs its own seed; the first shard has the seed of a whole parameter. The finalizer of
    SplitMix64 mixes the arguments (Steele et al., "Fast splittable pseudorandom number generators",
    2014).
    """
    mixed = 0
    for part in (torch_seed, parameter, step, *([shard] if shard else [])):
        mixed = (mixed + part + 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1


def round_stochastic(
    values: Tensor,  # (numel,) fp32
    seed: Tensor | int,  # 0-d int64
    first: int = 0,  # index of the first value in the parameter
) -> Tensor:
    """Round values to one of their bf16 neighbours, the nearer with the higher probability.

    NaN and infinities stay.
    """
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
