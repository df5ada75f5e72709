"""Ops on saved tensors that are offloaded to the host or a disk between a forward and its backward.

A tensor offloaded to a disk uses a host buffer from its `offload_saved` to the end of its
`write_saved`, and another from its `read_saved` to the end of its `fetch_saved`.
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
    """Copy a saved tensor of a stage to the host."""
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
    """Write a host copy to a disk; then its buffer is free."""
    unbound(write_saved)


@op(
    Stream.READ,
    by_subject,
    gives=Value.SAVED_ON_HOST,
    takes=(Takes(1, Value.SAVED_ON_DISK),),
    stored=of_value(),
)
def read_saved(stage: Stage, on_disk: Any, *, after: tuple[Any, ...] = ()) -> Any:
    """Read it into a host buffer once it is written, for its one fetch."""
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
    """Allocate device memory for an offloaded value."""
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
    """Copy a value back to the device once its `offload_saved` or `read_saved` is done."""
    unbound(fetch_saved)
