"""Places of tensors like the parameters of a bucket in a buffer: masters, gradients, states.

Neighbours are as many elements apart as the parameters are, so that parameters, gradients and
states of neighbours are spans of equal length, and one kernel call can update them. After a gap,
and where sizes of elements are mixed, they are one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from megacompile.ir.buckets import ALIGNMENT_BYTES, PADDED_NUMEL, Bucket


def mirrored(bucket: Bucket, item_bytes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Places for tensors like some of a bucket's parameters.

    Args:
        item_bytes: of an element of each, by the parameter's index; 0 for what takes none.

    Returns:
        The offset of each in bytes, by the parameter's index, and where the last one ends.
    """
    params = {i: bucket.params[i] for i in sorted(item_bytes)}
    alike = len({(param.dtype.itemsize, item_bytes[i]) for i, param in params.items()}) == 1
    found: dict[int, int] = {}
    behind = end = 0  # of the last one: where the next may begin that is no neighbour, its end
    for i, param in params.items():
        item = item_bytes[i]
        found[i] = behind
        if alike and i - 1 in found:
            apart_bytes = param.offset_bytes - bucket.params[i - 1].offset_bytes
            found[i] = found[i - 1] + apart_bytes // param.dtype.itemsize * item
        end = found[i] + param.numel * item
        padded_bytes = _rounded(param.numel, PADDED_NUMEL) * item
        behind = found[i] + (
            padded_bytes if alike else _rounded(param.numel * item, ALIGNMENT_BYTES)
        )
    return found, end


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
