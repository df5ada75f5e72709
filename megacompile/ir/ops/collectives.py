"""Collective ops. Each rank has a part of every bucket: its rows of each parameter."""

from __future__ import annotations

from typing import Any

from torch import fx

from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.ops.gradients import add_grad
from megacompile.ir.ops.op import (
    Part,
    Show,
    Takes,
    Value,
    by_slot,
    by_subject,
    of_argument,
    of_bucket,
    of_params,
    of_shard,
    op,
    unbound,
    value_bytes,
)
from megacompile.ir.stream import Stream


@op(
    Stream.H2D,
    by_slot,
    gives=Value.SHARD,
    reads=(Part.WEIGHTS,),
    slot=1,
    fills_slot=True,
    copied=of_shard,
    copies=of_params(),
)
def prefetch_shard(bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Any:
    """Copy this rank's part of a bucket to its places in a slot; `after` as for `prefetch`."""
    unbound(prefetch_shard)


@op(
    Stream.COMM,
    by_slot,
    gives=Value.WEIGHTS,
    takes=(Takes(2, Value.SHARD, ends=True),),
    slot=1,
    fills_slot=True,
    gathered=of_bucket,
)
def all_gather(bucket: Bucket, slot: Slot, shard: Any) -> Any:
    """Gather the other ranks' parts into a slot."""
    unbound(all_gather)


@op(Stream.COMPUTE, by_subject, gives=Value.GRADIENT_BUFFER, owns=True, show=Show.QUIET)
def alloc_shard(bucket: Bucket) -> Any:
    """Allocate device memory for this rank's part of a bucket's gradients."""
    unbound(alloc_shard)


@op(
    Stream.COMM,
    by_subject,
    gives=Value.GRADIENTS,
    takes=(
        Takes(1, Value.GRADIENTS, ends=True),
        Takes(2, Value.GRADIENT_BUFFER, ends=True),
    ),
    owns=True,
    fills=2,
    gathered=of_argument(1),
)
def reduce_scatter(bucket: Bucket, gradients: Any, buffer: Any) -> Any:
    """Average gradients over the shard ranks; each rank receives its part."""
    unbound(reduce_scatter)


def scattered(node: fx.Node) -> fx.Node | None:
    """The whole gradients that a `reduce_scatter` reduced to this part."""
    seen = set()  # stops at cycles of values
    while node not in seen and node.target in (all_reduce, add_grad):
        seen.add(node)
        source = node.args[2 if node.target is add_grad else 1]
        if not isinstance(source, fx.Node):
            return None
        node = source
    found = node.args[1] if node.target is reduce_scatter else None
    return found if isinstance(found, fx.Node) else None


@op(
    Stream.COMM,
    by_subject,
    gives=Value.GRADIENTS,
    takes=(Takes(1, Value.GRADIENTS, ends=True),),
    owns=True,
    fills=1,
    gathered=lambda node: value_bytes(scattered(node)),
    of_replicas=True,
)
def all_reduce(bucket: Bucket, gradients: Any) -> Any:
    """Average a part's gradients over replicas (the ranks with the same rows), in place."""
    unbound(all_reduce)
