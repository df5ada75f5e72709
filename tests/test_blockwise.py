"""8-bit blockwise quantization: the map, the round trip, short blocks, zeros and NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megacompile.runtime.optim import blockwise
from megacompile.runtime.optim.blockwise import absmax_numel, dequantize, dynamic_code, quantize
from megacompile.runtime.optim.states import BlockwiseTensor

SIZES = [0, 1, 255, 256, 257, 10**6 + 3]
BOTH = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def some_values(numel: int, signed: bool) -> Tensor:
    """Of many magnitudes."""
    torch.manual_seed(numel)
    values = torch.randn(numel) * 10.0 ** torch.randint(-6, 3, (numel,))
    return values if signed else values.abs()


def absmax_of_each(values: Tensor) -> Tensor:
    """Of the block that each value is in."""
    blocks = values.abs().split(blockwise.BLOCK)
    return torch.cat([torch.full_like(block, float(block.max())) for block in blocks])


@BOTH
def test_the_map(signed: bool) -> None:
    """256 different values, ascending, 0 and 1 among them; seven decades, in pairs if signed."""
    code = dynamic_code(signed)
    assert code.shape == (256,) and code.dtype == torch.float32
    assert (code[1:] > code[:-1]).all()
    assert (code == 0).sum() == 1 and code[-1] == 1
    assert code.abs()[code != 0].min() < 1e-6
    assert code[0] == (-1 if signed else 0)
    assert not signed or (code[1:][code[1:] < 0].flip(0).neg() == code[code > 0][:-2]).all()
    for decade in range(7):
        low, high = 10.0 ** (decade - 7), 10.0 ** (decade - 6)
        inside = int(((code >= low) & (code < high)).sum())
        assert inside == (2**decade if signed else 2 ** (decade + 1))
        assert not signed or int(((-code >= low) & (-code < high)).sum()) == inside - (decade == 6)


@BOTH
def test_codes_are_the_nearest(signed: bool) -> None:
    """Those of torch.bucketize on the midpoints, at, just below and just above each too."""
    code = dynamic_code(signed)
    midpoints = (code[1:] + code[:-1]) / 2
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    values = torch.cat(
        [
            midpoints,
            torch.nextafter(midpoints, up),
            torch.nextafter(midpoints, down),
            code,
            torch.rand(10**5) ** 6,
            torch.logspace(-40, 0, 10**4),
            torch.tensor([0.0, -0.0]),
        ]
    )
    values = torch.cat([values, -values]) if signed else values
    values = values.clamp(-1 if signed else 0, 1)
    rows = torch.nn.functional.pad(values, (0, -len(values) % 255)).view(-1, 255)
    rows = torch.cat([rows, torch.ones(len(rows), 1)], 1)  # each block's absmax is 1
    codes, absmax = quantize(rows.flatten(), signed)
    assert (absmax == 1).all()
    assert torch.equal(codes.long(), torch.bucketize(rows.flatten(), midpoints))
    assert len(codes.unique()) == 256


@BOTH
@pytest.mark.parametrize("numel", SIZES)
def test_round_trip(numel: int, signed: bool) -> None:
    """Shapes, dtypes, and an error within half of the widest gap of the map."""
    values = some_values(numel, signed)
    codes, absmax = quantize(values, signed)
    assert codes.shape == values.shape and codes.dtype == torch.uint8
    assert absmax.shape == (absmax_numel(numel),) and absmax.dtype == torch.float32
    back = dequantize(codes, absmax, signed)
    assert back.shape == values.shape and back.dtype == torch.float32
    if numel == 0:
        return
    largest = absmax_of_each(values)
    assert torch.equal(absmax, largest[:: blockwise.BLOCK])
    bound = torch.diff(dynamic_code(signed)).max() / 2
    assert ((back - values).abs() <= largest * bound * (1 + 1e-5)).all()
    assert dequantize(codes, absmax, signed, torch.bfloat16).dtype == torch.bfloat16


@BOTH
def test_a_second_round_trip_changes_nothing(signed: bool) -> None:
    """More of it: tests/test_checkpoints.py."""
    values = some_values(3 * blockwise.BLOCK + 5, signed)
    codes, absmax = quantize(values, signed)
    back = dequantize(codes, absmax, signed)
    again = quantize(back, signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], absmax)


@BOTH
def test_larger_values_have_no_lower_codes(signed: bool) -> None:
    values = torch.linspace(-1 if signed else 0, 1, blockwise.BLOCK)
    codes, _ = quantize(values, signed)
    assert (codes[1:] >= codes[:-1]).all()


@BOTH
def test_zeros_stay_zeros(signed: bool) -> None:
    values = torch.zeros(600)
    values[:256] = 1.0
    codes, absmax = quantize(values, signed)
    assert absmax.tolist() == [1.0, 0.0, 0.0]
    back = dequantize(codes, absmax, signed)
    assert torch.equal(back, values)
    values[10] = 0.0
    assert dequantize(*quantize(values, signed), signed)[10] == 0


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_takes_its_block_along(signed: bool, bad: float) -> None:
    values = torch.ones(600)
    values[300] = bad
    finite = dequantize(*quantize(values, signed), signed).isfinite()
    assert not finite[256:512].any()
    assert finite[:256].all() and finite[512:].all()


def test_small_parameters_are_not_quantized() -> None:
    assert [blockwise.quantizes(numel) for numel in (1, 4095, 4096, 10**6)] == [0, 0, 1, 1]


@pytest.mark.parametrize("signed", [False, True])
def test_clear_is_to_store_zeros(signed: bool) -> None:
    codes = [torch.full((1000,), 7, dtype=torch.uint8) for _ in range(2)]
    largest = [torch.ones(4) for _ in range(2)]
    cleared, stored = (
        BlockwiseTensor(torch.empty(10, 100), c, m, signed=signed, settle=lambda: None)
        for c, m in zip(codes, largest, strict=True)
    )
    cleared.clear()
    stored.store(torch.zeros(10, 100))
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(largest[0], largest[1])
