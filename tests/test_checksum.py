"""Tensors that differ in a bit have other checksums, and equal ones have the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacompile.runtime.device import checksum as module
from megacompile.runtime.device.checksum import checksum

MANY = 3 * module._NUMEL + 5  # float32, over four parts
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)


def drawn(numel: int = MANY, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 3, 1001, MANY])
def test_equal_ones_are_equal(numel: int, dtype: torch.dtype) -> None:
    assert checksum(drawn(numel, dtype)) == checksum(drawn(numel, dtype))


@pytest.mark.parametrize("at", [0, 1, 1023, module._NUMEL, MANY - 1])
@pytest.mark.parametrize("bit", [0, 15, 31])
def test_a_bit_anywhere_is_seen(at: int, bit: int) -> None:
    other = drawn()
    other.view(torch.int32)[at] ^= -(2**31) if bit == 31 else 2**bit
    assert checksum(other) != checksum(drawn())


def test_the_last_bytes_are_seen() -> None:
    some = torch.arange(4 * 7 + 3, dtype=torch.uint8)
    for at in range(4 * 7, 4 * 7 + 3):
        other = some.clone()
        other[at] += 1
        assert checksum(other) != checksum(some)


def test_the_order_matters_and_signs_do() -> None:
    x = drawn()
    assert checksum(x.flip(0)) != checksum(x)
    assert checksum(-x) != checksum(x), "each element differs in its highest bit"
    two = x.clone()
    two[:2] *= -1
    assert checksum(two) != checksum(x)
    parts = x.split(module._NUMEL)
    assert checksum(torch.cat((parts[1], parts[0], *parts[2:]))) != checksum(x)


def test_nan_and_zeros_are_their_bits() -> None:
    nan = torch.full((8,), torch.nan)
    assert checksum(nan) == checksum(nan.clone())
    other = nan.clone()
    other.view(torch.int32)[3] += 1
    assert other.isnan().all() and checksum(other) != checksum(nan)
    assert checksum(torch.zeros(4)) != checksum(-torch.zeros(4))
    assert checksum(torch.zeros(4)) != checksum(torch.zeros(5))


def test_strides_and_places_do_not_matter() -> None:
    x = drawn(1000 * 77).view(1000, 77)
    assert checksum(x.t().contiguous().t()) == checksum(x)
    assert checksum(torch.view_as_complex(x[:, :2].contiguous()).conj().conj()) == checksum(
        torch.view_as_complex(x[:, :2].contiguous())
    )
    odd = torch.cat((torch.zeros(1), x.reshape(-1))).bfloat16()[1:]
    assert odd.storage_offset() * 2 % 4 == 2 and checksum(odd) == checksum(odd.clone())
    assert checksum(torch.ones(())) == checksum(torch.ones(1))


def test_it_is_what_it_was_and_draws_nothing() -> None:
    """Other processes must get the same."""
    module._factors.cache_clear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = checksum(torch.arange(1000))
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(4)
    module._factors.cache_clear()
    with torch.inference_mode():
        assert checksum(torch.arange(1000)) == found
    assert not module._factors(torch.device("cpu")).is_inference()
