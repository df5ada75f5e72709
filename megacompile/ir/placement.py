"""The placement of a model's buckets: the runtime keeps it, and plans are made for it."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megacompile.ir.buckets import Bucket

LARGE = 1.5  # times the median: what goes to the disk last, and lives on the device first


@dataclass(frozen=True, slots=True)
class Placement:
    """The buckets that are on the device, what else is there of them, and whether that may
    change."""

    resident: frozenset[int] = frozenset()  # keys of the buckets that live on the device
    on_disk: frozenset[int] = frozenset()  # of those whose states are on the disk, if streamed
    weights_on_disk: frozenset[int] = frozenset()  # the same of parameters
    accumulates: bool = False  # may a forward find gradients there, of a backward before it?
    stays: str = ""  # why no bucket may go elsewhere; "": they may


def first_to_disk(buckets: Sequence[Bucket], trained: Collection[int]) -> list[Bucket]:
    """Buckets in the order in which their parameters go to a disk, where host memory is short.

    Frozen ones are only read, so they come first. Those that are much larger than most come last:
    each buffer that a disk is read into is as large as the largest. The first few of the others are
    far from one another, however many they are, so that a drive has work all through a step.

    Args:
        buckets: in forward order.
        trained: keys of those that have a parameter which gets a gradient.
    """
    usual = LARGE * statistics.median(bucket.size_bytes for bucket in buckets) if buckets else 0
    bits = len(buckets).bit_length()

    def place(i: int) -> tuple[int, bool, str]:
        size = buckets[i].size_bytes
        return size if size > usual else 0, buckets[i].key in trained, f"{i + 1:0{bits}b}"[::-1]

    return [buckets[i] for i in sorted(range(len(buckets)), key=place)]
