"""Ops that provide a bucket's weights."""

from __future__ import annotations

from typing import Any

from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.ops.op import (
    Part,
    Show,
    Value,
    by_slot,
    by_subject,
    named,
    of_bucket,
    op,
    unbound,
)
from megacompile.ir.stream import Stream


@op(Stream.COMPUTE, named, gives=Value.POINT, begins=True, issues=False, show=Show.QUIET)
def begin() -> Any:
    """Represent all work queued on the compute stream before this schedule."""
    unbound(begin)


@op(
    Stream.H2D,
    by_slot,
    gives=Value.WEIGHTS,
    reads=(Part.WEIGHTS,),
    slot=1,
    fills_slot=True,
    copied=of_bucket,
    copies=lambda node: 1,
)
def prefetch(bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Any:
    """Copy a bucket into a slot; `after` names its last update and the last reader of the slot."""
    unbound(prefetch)


@op(Stream.COMPUTE, by_slot, gives=Value.WEIGHTS, slot=1)
def reuse(bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Any:
    """Use the weights that the forward left in a slot; without a backward, the last forward."""
    unbound(reuse)


@op(Stream.COMPUTE, by_subject, gives=Value.WEIGHTS, lends=Part.WEIGHTS, show=Show.QUIET)
def resident(bucket: Bucket) -> Any:
    """Use the weights of a resident bucket."""
    unbound(resident)
