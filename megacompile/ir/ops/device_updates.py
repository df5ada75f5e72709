"""Ops of the optimizer's update on the device, for streamed buckets."""

from __future__ import annotations

from typing import Any

from torch import fx

from megacompile.ir.buckets import Bucket
from megacompile.ir.ops.op import (
    Part,
    Show,
    Takes,
    Value,
    by_subject,
    of_arguments,
    of_params,
    of_value,
    op,
    tensors_of_arguments,
    unbound,
    value_bytes,
)
from megacompile.ir.stream import Stream


@op(Stream.COMPUTE, by_subject, gives=Value.STATE_BUFFER, owns=True, show=Show.QUIET)
def alloc_state(bucket: Bucket, masters: bool) -> Any:
    """Allocate device memory for a bucket's optimizer states; with `masters`, for its parameters
    too.

    Parameters are fetched if the streamed copy has another dtype, or if no slot holds the weights.
    Otherwise the update allocates the new ones.
    """
    unbound(alloc_state)


@op(
    Stream.H2D,
    by_subject,
    gives=Value.STATES,
    takes=(Takes(1, Value.STATE_BUFFER, ends=True),),
    owns=True,
    fills=1,
    reads=(Part.STATES,),
    copied=of_value(),
    copies=of_params(times=2),
)
def fetch_state(bucket: Bucket, buffer: Any, masters: bool, *, after: tuple[Any, ...] = ()) -> Any:
    """Fetch the optimizer states after the last update; with `masters`, the parameters too."""
    unbound(fetch_state)


def _update_traffic(node: fx.Node) -> int:
    """Bytes of states and new parameters, read and written, and of gradients."""
    return 2 * value_bytes(node) + value_bytes(node.args[2])


@op(
    Stream.COMPUTE,
    by_subject,
    gives=Value.UPDATED,
    takes=(
        Takes(1, Value.WEIGHTS, optional=True),
        Takes(2, Value.GRADIENTS, ends=True),
        Takes(3, Value.STATES),
    ),
    owns=True,
    fills=3,
    is_update=True,
    show=Show.STEP,
    traffic=_update_traffic,
)
def update(bucket: Bucket, weights: Any, gradients: Any, state: Any) -> Any:
    """Run the optimizer's step on a bucket: writes new states to their buffer, and new parameters
    to the buffer or a new one."""
    unbound(update)


@op(
    Stream.D2H,
    by_subject,
    gives=Value.DONE,
    takes=(
        Takes(1, Value.UPDATED, ends=True),
        Takes(2, Value.NORMS, optional=True, like=1),
    ),
    writes=(Part.WEIGHTS, Part.STATES),  # parameters first: they are needed next
    copied=of_arguments,
    copies=tensors_of_arguments,
)
def offload_state(bucket: Bucket, updated: Any, norms: Any = None) -> Any:
    """Copy new parameters to their bucket, and new states to theirs.

    The gradient norms of an update in the backward are copied first.
    """
    unbound(offload_state)
