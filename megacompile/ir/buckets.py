"""Buckets and the slots that they are streamed into, as frozen data."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

ParamId = tuple[int, int]  # a parameter: the key of its bucket, and its index there

ALIGNMENT_BYTES = 256  # of each parameter in its bucket, like the CUDA allocator's
PADDED_NUMEL = 256  # in mirrors, offsets after a gap are rounded up to this many elements


def shard_shape(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[int, ...]:
    """The shape of one rank's rows of a tensor, as in DTensor's `Shard(0)`; the last ranks may have
    fewer rows, or none."""
    rows = -(-shape[0] // ranks)
    return (max(0, min(rows, shape[0] - rank * rows)), *shape[1:])


@dataclass(frozen=True)
class Param:
    """The place of one parameter, or of a part of one, in its bucket."""

    name: str  # fully qualified, as in named_parameters(); for a component, followed by its path
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int
    packed: bool = False  # component of a packed parameter: never trained or cast

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def shard_numel(self, ranks: int) -> int:
        """Elements of each rank's part, including the padding of the last parts."""
        return self.numel if ranks == 1 else math.prod(shard_shape(self.shape, 0, ranks))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The parameters of a unit of the module tree as one flat host buffer. `key` identifies the
    buffer; `label` is printed: the index of the first stage that reads it in this schedule, with
    ".1", ".2" if that stage reads several. With several `ranks`, this is the full bucket as it lies
    in a slot: each parameter's rows in order, padded so that all ranks have equally many. A rank's
    own buffer has the layout `shard(rank)`."""

    key: int
    name: str  # the unit's module path, e.g. "layers.3"
    params: tuple[Param, ...]
    size_bytes: int
    label: str = "?"
    ranks: int = 1
    replicas: int = 1  # number of ranks with the same rows but different gradients

    def __hash__(self) -> int:
        return hash((self.key, self.label))  # slow for hundreds of parameters

    @staticmethod
    def layout(
        key: int,
        name: str,
        params: Sequence[tuple[str, torch.Tensor]],
        packed: Collection[str] = (),
        ranks: int = 1,
        replicas: int = 1,
    ) -> Bucket:
        """Place `params` consecutively, each aligned to `ALIGNMENT_BYTES`. Dense, non-overlapping
        strides (such as channels_last) are kept; other strides, and the strides of parameters that
        ranks share, become contiguous. `packed`: the names of components of packed parameters."""
        placed = []
        offset = 0
        for param_name, tensor in params:
            shape, dtype = tuple(tensor.shape), tensor.dtype
            like = tensor if ranks == 1 else torch.empty(shape, dtype=dtype, device="meta")
            stride = torch.empty_like(like, device="meta").stride()  # preserve_format
            part = param_name in packed
            param = Param(param_name, shape, tuple(stride), dtype, offset, part)
            placed.append(param)
            size_bytes = param.shard_numel(ranks) * dtype.itemsize
            offset += ranks * rounded(size_bytes, ALIGNMENT_BYTES)
        return Bucket(key, name, tuple(placed), offset, ranks=ranks, replicas=replicas)

    def shard(self, rank: int) -> Bucket:
        """The layout of one rank's part in its own buffer."""
        if self.ranks == 1:
            return self
        params = [
            replace(
                param,
                shape=shard_shape(param.shape, rank, self.ranks),
                offset_bytes=param.offset_bytes // self.ranks,
            )
            for param in self.params
        ]
        size_bytes = self.size_bytes // self.ranks
        return replace(self, params=tuple(params), size_bytes=size_bytes, ranks=1)

    def rows_of(self, rank: int) -> tuple[Param, ...]:
        """The places of one rank's part inside a slot, which holds the parts of all ranks."""
        if self.ranks == 1:
            return self.params
        return tuple(
            replace(
                part,
                offset_bytes=param.offset_bytes
                + rank * param.shard_numel(self.ranks) * param.dtype.itemsize,
            )
            for param, part in zip(self.params, self.shard(rank).params, strict=True)
        )

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's buffer."""
        return self.size_bytes // self.ranks

    @property
    def suffix(self) -> str:
        """The label as a suffix of names."""
        return self.label.replace(".", "_")

    def __repr__(self) -> str:
        return f"bucket_{self.suffix}"


@functools.lru_cache(maxsize=4096)
def largest_shard(bucket: Bucket) -> Bucket:
    """The largest part of a bucket on any rank; the bucket itself with one rank."""
    return bucket.shard(0)


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
    roots: frozenset[int]  # the outermost ones: a call of one is a stage
    repeated: bool  # a child of a container of equal modules: its stages share a template


# Offsets in buffers that mirror a bucket's parameters: masters, gradients, states.
# Neighbors keep the parameters' distance in elements, so that parameters, gradients and states of
# neighbors are spans of equal length, and one kernel call can update them. After a gap, or with
# mixed element sizes, they follow one another.


def mirrored(bucket: Bucket, item_bytes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Parameter index -> offset in bytes of a tensor shaped like it, and the end of the last one.
    `item_bytes`: parameter index -> bytes per element; 0 for no tensor."""
    params = {i: bucket.params[i] for i in sorted(item_bytes)}
    alike = len({(param.dtype.itemsize, item_bytes[i]) for i, param in params.items()}) == 1
    found: dict[int, int] = {}
    after = end = 0  # the next offset after a gap, and the end of the last tensor
    for i, param in params.items():
        item = item_bytes[i]
        found[i] = after
        if alike and i - 1 in found:
            apart_bytes = param.offset_bytes - bucket.params[i - 1].offset_bytes
            found[i] = found[i - 1] + apart_bytes // param.dtype.itemsize * item
        end = found[i] + param.numel * item
        padded_bytes = rounded(param.numel, PADDED_NUMEL) * item
        next_bytes = padded_bytes if alike else rounded(param.numel * item, ALIGNMENT_BYTES)
        after = found[i] + next_bytes
    return found, end


def rounded(size: float, unit: int) -> int:
    """The size, rounded up to a multiple of a unit."""
    return -(-math.ceil(size) // unit) * unit
