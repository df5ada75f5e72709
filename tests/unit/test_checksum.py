"""Checksums differ where tensors differ in a bit, and are equal where these are."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megacompile.runtime.device.checksum import checksum

PART = 2**18  # int32 that are summed at once
MANY = 3 * PART + 5  # float32, over four parts
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)


def drawn(numel: int = MANY, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_a_bit_anywhere_and_the_order_are_seen() -> None:
    x = drawn()
    first, second, *rest = x.split(PART)
    others = [x.flip(0), -x, torch.cat((second, first, *rest))]
    for at, bit in itertools.product((0, 1, PART, MANY - 1), (0, 15, 31)):
        others.append(x.clone())
        others[-1].view(torch.int32)[at] ^= -(2**31) if bit == 31 else 2**bit
    assert len({checksum(other) for other in (x, *others)}) == 1 + len(others)
    some = torch.arange(4 * 7 + 3, dtype=torch.uint8)
    ends = [some.index_fill(0, torch.tensor([at]), 99) for at in range(4 * 7, 4 * 7 + 3)]
    assert len({checksum(other) for other in (some, *ends)}) == 4, "no whole word"
    nan = torch.full((8,), torch.nan)
    nan.view(torch.int32)[3] += 1
    assert checksum(nan) != checksum(torch.full((8,), torch.nan))
    zeros = [torch.zeros(4), -torch.zeros(4), torch.zeros(5)]
    assert len(set(map(checksum, zeros))) == 3


def test_strides_and_places_do_not_matter_and_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    for numel, dtype in itertools.product((0, 1, 3, 1001), DTYPES):
        assert checksum(drawn(numel, dtype)) == checksum(drawn(numel, dtype)), (numel, dtype)
    x = drawn(1000 * 77).view(1000, 77)
    assert checksum(x.t().contiguous().t()) == checksum(x)
    pairs = torch.view_as_complex(x[:, :2].contiguous())
    assert checksum(pairs.conj().conj()) == checksum(pairs)
    odd = torch.cat((torch.zeros(1), x.reshape(-1))).bfloat16()[1:]
    assert odd.storage_offset() * 2 % 4 == 2 and checksum(odd) == checksum(odd.clone())
    assert torch.get_rng_state().equal(before)
