"""Bytes that parts of a bucket take where they are: in flat buffers on the host, and on a disk.

On the host the tensors of a part are in one buffer (`megacompile.ir.buckets`). On a disk buffers
begin and end at pages, and so do the buffers of host memory that they come to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from megacompile.cost.optimizer import EIGHT_BITS, OptimizerCost
from megacompile.ir.buckets import ALIGNMENT_BYTES, Bucket, largest_shard, mirrored
from megacompile.runtime.optim.blockwise import absmax_numel, quantizes

_PAGE = 4096  # places in a scratch file begin and end at pages
_FLOAT32 = 4.0  # bytes, of the states of small parameters, which are never in 8 bits


def flat_bytes(bucket: Bucket, indices: Iterable[int], item_of: Callable[[int], float]) -> int:
    """Bytes of a buffer with a tensor like each of some parameters.

    Args:
        item_of: the bytes of an element, by those of the parameter's as it is streamed.
    """
    items = {i: math.ceil(item_of(bucket.params[i].dtype.itemsize)) for i in indices}
    return mirrored(bucket, items)[1]


def state_bytes(bucket: Bucket, trained: Iterable[int], cost: OptimizerCost) -> list[int]:
    """Bytes of the buffers of each optimizer state that every parameter has; of a rank.

    Args:
        bucket: what ranks have together.
        trained: indices of the parameters that get a gradient.
    """
    if not cost.states or not (indices := list(trained)):
        return []
    mine = largest_shard(bucket)
    if cost.state_bytes != EIGHT_BITS:
        return [flat_bytes(mine, indices, lambda item: cost.states_of(item) / cost.states)]
    small = [i for i in indices if not quantizes(bucket.params[i].numel)]
    codes = 0
    for i in sorted(set(indices) - set(small)):
        codes += _codes_bytes(mine.params[i].numel)
    found = [codes, flat_bytes(mine, small, lambda item: _FLOAT32)]
    return [size for size in found if size]


def stored_bytes(bucket: Bucket, trained: Iterable[int], cost: OptimizerCost) -> int:
    """Bytes that a rank's states of a bucket take on a disk, where each parameter's has a place.

    The set of buffers that they come to in host memory is as large.

    Args:
        bucket: what ranks have together.
        trained: indices of the parameters that get a gradient.
    """
    size, mine = 0, largest_shard(bucket)
    for i in trained if cost.states else ():
        param = mine.params[i]
        if cost.state_bytes != EIGHT_BITS:
            each = math.ceil(param.numel * cost.states_of(param.dtype.itemsize) / cost.states)
        elif quantizes(bucket.params[i].numel):
            each = _codes_bytes(param.numel)
        else:
            each = math.ceil(param.numel * _FLOAT32)
        size += cost.states * whole_pages(each)
    return size


def stored_weights_bytes(bucket: Bucket) -> int:
    """Bytes that the parameters of a bucket take there, which have one place together."""
    return whole_pages(bucket.size_bytes)


def whole_pages(size_bytes: int) -> int:
    """Bytes of the place on a disk that so many take."""
    return _rounded(size_bytes, _PAGE)


def _codes_bytes(numel: int) -> int:
    """Bytes of the codes and largest magnitudes of a parameter."""
    return _rounded(numel, ALIGNMENT_BYTES) + _rounded(4 * absmax_numel(numel), ALIGNMENT_BYTES)


def _rounded(size: float, unit: int) -> int:
    return -(-math.ceil(size) // unit) * unit
