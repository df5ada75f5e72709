"""8-bit optimizer states: blocks of 256 values, each a code of the dynamic map times the block's
largest magnitude.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv 2110.02861.
The map has seven decades, from 1e-6 to 1, each with twice as many codes as the one below. The first
moment uses the signed map, the second the unsigned one. Invariants: the code of 0 is exact, so a
block of zeros stays zeros; a block with a NaN or an infinity becomes NaN.

[Note: the same codes again] Quantizing dequantized values returns the same codes and largest
magnitudes, bitwise. So a checkpoint stores only the float32 values, and any optimizer can load it.
This needs three things:

- The largest magnitude of a block has its own code, 1 or -1, so it is exact. The source's signed
  map has no -1; here its lowest code is -1 instead of -0.993.
- The other values have a relative error of at most 2^-23, and codes are at least 2^-8 apart. This
  holds only for normal numbers, so a block whose largest magnitude is below `SMALLEST` becomes
  zeros: the square root of `SMALLEST` is 2e-16.
- Values cannot be divided by infinity or NaN, so the largest magnitude of such a block is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megacompile import compat

BLOCK = 256  # values that share one absmax
MIN_SIZE = 4096  # elements; a smaller parameter keeps fp32 states
SMALLEST = 2.0**-104  # largest magnitude; the lowest codes stand for more than 2^-22 of it
TABLE_NUMEL = 256 + 256 + 2**16  # a row of `tables`

_DECADES = 7


def quantizes(numel: int) -> bool:
    """True if the states of a parameter of this size are kept in 8 bits. `numel` is the size of the
    whole parameter, not of a rank's shard, which may be empty."""
    return numel >= MIN_SIZE


def absmax_numel(numel: int) -> int:
    """Number of blocks in `numel` values; the last block may be short."""
    return -(-numel // BLOCK)


def dynamic_code(signed: bool) -> Tensor:
    """The values of the 256 codes: (256,) fp32 on the CPU, ascending; the last is 1. Decade d (0 is
    the lowest) divides [0.1, 1] * 10^(d - 6) into 2^d bins for each sign, or 2^(d + 1) if unsigned.
    Its codes are the middles of the bins; 0 and 1 are the two other codes. The signed map has -1 in
    its lowest bin."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        bins = 2**decade if signed else 2 ** (decade + 1)
        power = 10.0 ** (decade - _DECADES + 1)
        middles = [power * (0.1 + 0.9 * (i + 0.5) / bins) for i in range(bins)]
        values += middles
        if signed:
            values += [-middle for middle in middles]
    codes = torch.tensor(sorted(values), dtype=torch.float32)
    if signed:
        codes[0] = -1.0  # see [Note: the same codes again]
    return codes


# Dynamo would trace through a cached function and compute the tables in every call. A graph can
# have only one constant of a name, so compiled code calls this once and passes the result on.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def tables(device: torch.device) -> Tensor:
    """The unsigned and the signed map on a device, cached: (2, TABLE_NUMEL) fp32. A row has
    `dynamic_code` (256), the midpoints of neighbouring codes (255, then infinity) and the code of
    the lowest value of each cell (65536). A cell is the set of values with the same upper 16 bits.
    Cells are narrower than the distance between codes, so a value's nearest code is its cell's code
    or the next one."""
    return _tables(device)


@functools.cache
def _tables(device: torch.device) -> Tensor:
    codes = torch.stack([dynamic_code(False), dynamic_code(True)])
    midpoints = (codes[:, 1:] + codes[:, :-1]) / 2
    cells = torch.arange(2**16, dtype=torch.int32)
    ends = ((cells << 16) | 0xFFFF).view(torch.float32), (cells << 16).view(torch.float32)
    lowest = torch.where(cells >= 2**15, *ends)
    lowest = torch.where(lowest.isnan(), 1.0, lowest)
    guesses = torch.stack([torch.bucketize(lowest, row).float() for row in midpoints])
    padded = functional.pad(midpoints, (0, 1), value=torch.inf)
    return torch.cat([codes, padded, guesses], 1).to(device)


def quantize(
    values: Tensor,  # (numel,) any float dtype
    signed: bool,
    table: Tensor | None = None,  # `tables`, if one compiled function quantizes several times
) -> tuple[Tensor, Tensor]:
    """The nearest codes, (numel,) uint8, and each block's largest magnitude, fp32. A tie takes the
    lower code. The unsigned map needs values of at least 0. A largest magnitude below `SMALLEST`
    becomes 0; one that is not finite becomes NaN. See [Note: the same codes again]."""
    table = tables(values.device) if table is None else table
    numel = values.numel()
    padded = functional.pad(values.float(), (0, -numel % BLOCK))
    rows = padded.view(absmax_numel(numel), BLOCK)
    absmax = rows.abs().amax(1)
    absmax = torch.where(absmax < torch.inf, absmax, torch.nan)
    # SMALLEST as a literal: Dynamo would turn a module's float into an input (torch 2.11)
    absmax = torch.where(absmax < 2.0**-104, 0.0, absmax)
    divisor = torch.where(absmax == 0, 1.0, absmax)
    _, midpoints, guesses = table[int(signed)].split((256, 256, 2**16))
    scaled = rows / divisor[:, None]
    guess = guesses[(scaled.view(torch.int32) >> 16) & 0xFFFF].int()
    codes = guess + (scaled > midpoints[guess])
    return codes.to(torch.uint8).view(-1)[:numel], absmax


def dequantize(
    codes: Tensor,  # (numel,) uint8
    absmax: Tensor,  # (absmax_numel(numel),) fp32
    signed: bool,
    dtype: torch.dtype = torch.float32,
    table: Tensor | None = None,  # `tables`, if one compiled function dequantizes several times
) -> Tensor:
    """The values of the codes: (numel,) in `dtype`."""
    table = tables(codes.device) if table is None else table
    numel = codes.numel()
    padded = functional.pad(codes, (0, -numel % BLOCK)).view(absmax.numel(), BLOCK)
    values: Tensor = table[int(signed)].split((256, 256, 2**16))[0]
    rows = values[padded.int()] * absmax[:, None]
    return rows.view(-1)[:numel].to(dtype)


# The tensor subclass of 8-bit states in `optimizer.state`.


class BlockwiseTensor(torch.Tensor):
    """A float32 tensor stored as 8-bit codes and a largest magnitude per block. Reads dequantize;
    in-place writes quantize. `codes` is (numel,) uint8, `absmax` (blocks,) float32, in the memory
    order of the parameter. `settle` waits for background writes to them."""

    codes: torch.Tensor
    absmax: torch.Tensor
    signed: bool
    settle: Callable[[], None]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        codes: torch.Tensor,
        absmax: torch.Tensor,
        *,
        signed: bool,
        settle: Callable[[], None],
    ) -> BlockwiseTensor:
        looks = torch.empty_like(like, dtype=torch.float32, device="meta")
        self: BlockwiseTensor = compat.wrapper(cls, looks, codes.device)
        self.codes, self.absmax, self.signed, self.settle = codes, absmax, signed, settle
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.plain()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def plain(self) -> torch.Tensor:
        """The values as a new float32 tensor."""
        self.settle()
        values = dequantize(self.codes, self.absmax, self.signed)
        return values.as_strided(self.shape, self.stride())

    def store(self, values: torch.Tensor) -> None:
        """Quantize new values of this tensor's shape, or copy those of one like it. No background
        work may run: `plain` has waited, or the step has."""
        if isinstance(values, BlockwiseTensor) and (
            (values.shape, values.stride(), values.signed)
            == (self.shape, self.stride(), self.signed)
        ):
            values.settle()
            self.codes.copy_(values.codes)
            self.absmax.copy_(values.absmax)
            return
        laid_out = torch.empty_strided(
            self.shape, self.stride(), dtype=torch.float32, device=self.codes.device
        )
        flat = laid_out.copy_(values).as_strided((self.numel(),), (1,))
        for buffer, new in zip((self.codes, self.absmax), quantize(flat, self.signed), strict=True):
            buffer.copy_(new)

    def clear(self) -> None:
        """Set all values to zero; quantizing a billion zeros would take seconds."""
        self.settle()
        code, _ = quantize(torch.zeros(1, device=self.codes.device), self.signed)
        self.codes.fill_(code.item())
        self.absmax.zero_()

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        of = BlockwiseTensor
        return compat.call_with(func, args, kwargs or {}, of, of.plain, of.store)


def to_plain(value: Any) -> Any:
    """Convert 8-bit states in nested containers to float32 tensors; other values stay."""
    return compat.tree_map(_plain, value)


def _plain(value: Any) -> Any:
    part = compat.local(value)
    return compat.like(value, part.plain()) if isinstance(part, BlockwiseTensor) else value
