"""Buckets and the slots that they are streamed into, as frozen data."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

ParamId = tuple[int, int]  # a parameter: the key of its bucket, and its index there

ALIGNMENT_BYTES = 256  # of each parameter in its bucket, as the CUDA allocator gives
PADDED_NUMEL = 256  # elements that places of what mirrors no neighbours are rounded up to


@dataclass(frozen=True, slots=True)
class Param:
    """The place of one parameter, or of a part of one, in its bucket."""

    name: str  # fully qualified, as in named_parameters(); of a part, with its path behind it
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int
    packed: bool = False  # a part of a packed parameter (megacompile.packed): never trained or cast

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """The parameters of a unit of the module tree as one flat host buffer.

    `key` identifies the buffer; `label` is what is printed: the index of the first stage that
    reads it in this schedule, with ".1", ".2" where that stage reads more than one.
    """

    key: int
    name: str  # the unit's module path, e.g. "layers.3"
    params: tuple[Param, ...]
    size_bytes: int
    label: str = "?"

    def __hash__(self) -> int:
        return hash((self.key, self.label))  # of hundreds of parameters it would be slow

    @staticmethod
    def layout(
        key: int,
        name: str,
        params: Sequence[tuple[str, torch.Tensor]],
        packed: Collection[str] = (),
    ) -> Bucket:
        """Place `params` one after the other, each aligned to `ALIGNMENT_BYTES`.

        Dense, non-overlapping strides (such as channels_last) are kept; others become contiguous.
        `packed` are the names of parts of packed parameters.
        """
        placed = []
        offset = 0
        for param_name, tensor in params:
            stride = torch.empty_like(tensor, device="meta").stride()  # preserve_format
            shape, dtype = tuple(tensor.shape), tensor.dtype
            part = param_name in packed
            param = Param(param_name, shape, tuple(stride), dtype, offset, part)
            placed.append(param)
            offset += -(-param.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return Bucket(key, name, tuple(placed), offset)

    @property
    def suffix(self) -> str:
        """The label as the end of a name."""
        return self.label.replace(".", "_")

    def __repr__(self) -> str:
        return f"bucket_{self.suffix}"


@dataclass(frozen=True, slots=True)
class Slot:
    """A device buffer that buckets are streamed into."""

    index: int
    size_bytes: int

    def __repr__(self) -> str:
        return f"slot_{self.index}"


@dataclass(frozen=True, slots=True)
class Unit:
    """A subtree of the module tree that is streamed as one bucket."""

    bucket: Bucket
    modules: frozenset[int]  # id() of the modules of the subtree
    roots: frozenset[int]  # those of them that contain the others: a call of one is a stage
    repeated: bool  # a child of a container of like modules: stages of it share a template
