"""Checksums differ where tensors differ in a bit, and are equal where these are."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megacompile.runtime.device import checksum as module
from megacompile.runtime.device.checksum import checksum

MANY = 3 * module._NUMEL + 5  # float32, over four parts
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)


def drawn(numel: int = MANY, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_a_bit_anywhere_is_seen() -> None:
    x = drawn()
    right = checksum(x)
    for at, bit in itertools.product((0, 1, module._NUMEL, MANY - 1), (0, 15, 31)):
        flip = -(2**31) if bit == 31 else 2**bit
        x.view(torch.int32)[at] ^= flip
        assert checksum(x) != right, (at, bit)
        x.view(torch.int32)[at] ^= flip
    some = torch.arange(4 * 7 + 3, dtype=torch.uint8)
    for at in range(4 * 7, 4 * 7 + 3):  # the last bytes, which are no whole word
        other = some.clone()
        other[at] += 1
        assert checksum(other) != checksum(some)
    nan = torch.full((8,), torch.nan)
    nan.view(torch.int32)[3] += 1
    assert checksum(nan) != checksum(torch.full((8,), torch.nan))


def test_the_order_signs_and_sizes_matter() -> None:
    x = drawn()
    two = x.clone()
    two[:2] *= -1
    first, second, *rest = x.split(module._NUMEL)
    for other in (x.flip(0), -x, two, torch.cat((second, first, *rest))):
        assert checksum(other) != checksum(x)
    zeros = [torch.zeros(4), -torch.zeros(4), torch.zeros(5)]
    assert len(set(map(checksum, zeros))) == 3


def test_strides_and_places_do_not_matter() -> None:
    for numel, dtype in itertools.product((0, 1, 3, 1001), DTYPES):
        assert checksum(drawn(numel, dtype)) == checksum(drawn(numel, dtype)), (numel, dtype)
    x = drawn(1000 * 77).view(1000, 77)
    assert checksum(x.t().contiguous().t()) == checksum(x)
    pairs = torch.view_as_complex(x[:, :2].contiguous())
    assert checksum(pairs.conj().conj()) == checksum(pairs)
    odd = torch.cat((torch.zeros(1), x.reshape(-1))).bfloat16()[1:]
    assert odd.storage_offset() * 2 % 4 == 2 and checksum(odd) == checksum(odd.clone())


def test_it_is_what_it_is_in_other_processes_and_draws_nothing() -> None:
    torch.manual_seed(3)
    before, found = torch.get_rng_state(), checksum(torch.arange(1000))
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(4)
    module._factors.cache_clear()
    with torch.inference_mode():
        assert checksum(torch.arange(1000)) == found
    assert checksum(torch.arange(1000)) == found
