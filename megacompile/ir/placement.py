"""Where a model's buckets live: the runtime keeps it, and whoever makes plans is given it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Which buckets are on the device, with what, and whether that may change."""

    resident: frozenset[int] = frozenset()  # keys of the buckets that live on the device
    on_disk: frozenset[int] = frozenset()  # of those whose states lie on the disk, if streamed
    accumulates: bool = False  # may a forward find gradients there, of a backward before it?
    whole: frozenset[int] = frozenset()  # of those that each rank of a host copies whole
    stays: str = ""  # why no bucket may go elsewhere; "": they may
