"""Ops on saved tensors that wait on the host, or on a disk, between a forward and its backward.

One that goes on to a disk is in a buffer of host memory from its `offload_saved` to the end of its
`write_saved`, and in another one from its `read_saved` until its `fetch_saved` has copied it.
"""

from __future__ import annotations

from typing import Any

from megacompile.ir.ops.op import (
    Show,
    Takes,
    Value,
    by_subject,
    of_argument,
    of_arguments,
    of_value,
    op,
    unbound,
)
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream


@op(
    Stream.D2H,
    by_subject,
    gives=Value.SAVED_ON_HOST,
    takes=(Takes(1),),
    to_backward=True,
    copied=of_arguments,
)
def offload_saved(stage: Stage, value: Any, *, after: tuple[Any, ...] = ()) -> Any:
    """Copy what a stage's backward takes from the forward to the host, where it waits."""
    unbound(offload_saved)


@op(
    Stream.WRITE,
    by_subject,
    gives=Value.SAVED_ON_DISK,
    takes=(Takes(1, Value.SAVED_ON_HOST),),
    to_backward=True,
    stored=of_argument(1),
)
def write_saved(stage: Stage, on_host: Any) -> Any:
    """Write a copy on the host to a disk, where it waits; then its buffer is free."""
    unbound(write_saved)


@op(
    Stream.READ,
    by_subject,
    gives=Value.SAVED_ON_HOST,
    takes=(Takes(1, Value.SAVED_ON_DISK),),
    stored=of_value(),
)
def read_saved(stage: Stage, on_disk: Any, *, after: tuple[Any, ...] = ()) -> Any:
    """Read it into a buffer on the host once it is written, for the one fetch that takes it."""
    unbound(read_saved)


@op(
    Stream.COMPUTE,
    by_subject,
    gives=Value.SAVED_BUFFER,
    takes=(Takes(1, Value.SAVED_ON_HOST),),
    owns=True,
    show=Show.QUIET,
)
def alloc_saved(stage: Stage, on_host: Any) -> Any:
    """Device memory for a value that waits on the host, or on a disk."""
    unbound(alloc_saved)


@op(
    Stream.H2D,
    by_subject,
    gives=Value.SAVED,
    takes=(Takes(1, Value.SAVED_ON_HOST), Takes(2, Value.SAVED_BUFFER, ends=True, like=1)),
    owns=True,
    fills=2,
    copied=of_value(),
)
def fetch_saved(stage: Stage, on_host: Any, buffer: Any) -> Any:
    """Copy a value back to the device, once its `offload_saved`, or `read_saved`, is done."""
    unbound(fetch_saved)
