"""The table of a bucket's parameters that an update kernel reads.

The parameters of a bucket have their own tensors, sizes and scalars. Three device tensors describe
them to the kernel; this module and the kernels share the layout:

    blocks  (programs, 2) int32: the parameter's row, the block's number in the parameter
    table   (params, columns) int64: numel; addresses of param, out, copy, grad, each state (or its
            codes) and each state's absmax; the seed; the address of the gradient's factor. Missing
            tensors are 0
    hyper   (params, columns) fp32 or fp64: `OptimizerRule.hyper`

`blocks` depends only on the sizes and is cached. The others are fetched in every call, from one new
pinned tensor (see `kernels.fetch`). If only gradients and scalars change between steps, the
`Table` is reused.

Triton is imported for the first bucket on a CUDA device.
"""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megacompile.runtime.optim.blockwise import absmax_numel
from megacompile.runtime.optim.rule import OptimizerRule, Update, math_dtype

NUMEL, PARAM, OUT, COPY, GRAD, STATES = range(6)  # columns; STATES is the first state's

_ALIGNMENT = 16  # wide loads need it: bytes of an address, elements of a size


class Signature(NamedTuple):
    """The compilation key of a kernel; all parameters of a launch share it."""

    param: torch.dtype
    grad: torch.dtype
    copy: torch.dtype | None
    states: tuple[torch.dtype | None, ...]  # uint8: 8-bit codes
    stochastic: bool
    aligned: bool
    scaled: bool  # True if gradients have a factor


class Launch(NamedTuple):
    """One launch of a kernel."""

    signature: Signature
    blocks: Tensor  # (programs, 2) int32
    packed: Tensor  # the table and the scalars on the host, both aligned to 16 bytes: int64
    columns: tuple[int, int]  # of the table and of the scalars
    params: int

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The table and the scalars in `packed`, or in a copy of it."""
        dtype, (columns, hypers) = math_dtype(self.signature.param), self.columns
        numel = self.params * columns
        hyper = packed[numel + numel % 2 :].view(dtype)[: self.params * hypers]
        return packed[:numel].view(-1, columns), hyper.view(-1, hypers)


class Table:
    """The parameters of one launch, which can be repeated with other gradients."""

    def __init__(
        self, signature: Signature, rows: Sequence[list[int]], positions: Sequence[int]
    ) -> None:
        self.signature = signature
        self.positions = positions  # of the parameters in the step
        self._columns = len(rows[0])
        self._rows = array("q", itertools.chain.from_iterable(rows))
        self._numels = tuple([row[NUMEL] for row in rows])

    def renew(self, gradients: Sequence[int], factors: Sequence[int] | None) -> None:
        """Set the addresses of other gradients, aligned like the previous ones, and of their
        factors, of all parameters of the step."""
        rows, columns, positions = self._rows, self._columns, self.positions
        of_factors = [factors[k] for k in positions] if factors else [0] * len(positions)
        rows[GRAD::columns] = array("q", [gradients[k] for k in positions])
        rows[columns - 1 :: columns] = array("q", of_factors)
        self.signature = self.signature._replace(scaled=factors is not None)

    def launch(
        self, hypers: Sequence[tuple[float, ...]], *, block: int, device: torch.device
    ) -> Launch:
        """The launch for a step with these scalars of all its parameters, `block` elements per
        program."""
        own = [hypers[k] for k in self.positions]
        kind = "d" if math_dtype(self.signature.param) == torch.float64 else "f"
        as_bytes = {each: array(kind, each).tobytes() for each in set(own)}
        packed = bytearray(self._rows.tobytes() + bytes(len(self._rows) % 2 * 8))
        packed.extend(b"".join(map(as_bytes.__getitem__, own)))
        packed.extend(bytes(-len(packed) % 8))
        return Launch(
            self.signature,
            program_blocks(self._numels, block, device),
            torch.frombuffer(packed, dtype=torch.int64),
            (self._columns, len(own[0])),
            len(own),
        )


def tables_of(described: Mapping[int, tuple[Signature, list[int]]]) -> list[Table]:
    """A table for each signature among the parameters: position -> signature and row."""
    groups: dict[Signature, list[int]] = {}
    for position, (signature, _) in described.items():
        groups.setdefault(signature, []).append(position)
    return [
        Table(signature, [described[position][1] for position in positions], positions)
        for signature, positions in groups.items()
    ]


def launches(rule: OptimizerRule, updates: Sequence[Update], *, block: int) -> Iterator[Launch]:
    """One launch for each signature among the updates, with `block` elements per program."""
    described = {i: describe(rule, update) for i, update in enumerate(updates)}
    hypers = [tuple(update.hyper) for update in updates]
    for table in tables_of({i: d for i, d in described.items() if d[1][NUMEL]}):
        yield table.launch(hypers, block=block, device=updates[0].grad.device)


def describe(rule: OptimizerRule, update: Update) -> tuple[Signature, list[int]]:
    """A parameter's signature and its row of the table."""
    param, grad, given, _, out, copy, seed, factor = update
    numel = param.numel()
    out = param if out is None else out
    codes = [state[0] if isinstance(state, tuple) else state for state in given]
    absmaxes = [state[1] if isinstance(state, tuple) else None for state in given]
    assert len(given) == len(rule.moments) and out.dtype == param.dtype
    for moment, state, absmax in zip(rule.moments, codes, absmaxes, strict=True):
        assert state is not None or moment.option is not None, moment.name
        assert absmax is None or (state is not None and state.dtype == torch.uint8)
        assert absmax is None or absmax.dtype == torch.float32
    assert factor is None or (factor.dtype, factor.dim()) == (grad.dtype, 0)
    dense = [_address(tensor, numel) for tensor in (param, out, copy, grad, *codes)]
    scales = [_address(tensor, absmax_numel(numel)) for tensor in absmaxes]
    signature = Signature(
        param=param.dtype,
        grad=grad.dtype,
        copy=None if copy is None else copy.dtype,
        states=tuple(None if state is None else state.dtype for state in codes),
        stochastic=seed is not None and param.dtype == torch.bfloat16,
        aligned=functools.reduce(operator.or_, dense, numel) % _ALIGNMENT == 0,
        scaled=factor is not None,
    )
    at = 0 if factor is None else factor.data_ptr()
    return signature, [numel, *dense, *scales, seed or 0, at]


def _address(tensor: Tensor | None, numel: int) -> int:
    """The address of a tensor's memory; 0 if there is none."""
    assert tensor is None or (tensor.numel() == numel and tensor.is_contiguous())
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def program_blocks(numels: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """The parameter and the block of each program: (programs, 2) int32."""
    counts = torch.tensor([-(-numel // block) for numel in numels])
    rows = torch.repeat_interleave(torch.arange(len(numels)), counts)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    numbers = torch.arange(len(rows)) - starts
    return torch.stack([rows, numbers], 1).to(torch.int32).to(device)
