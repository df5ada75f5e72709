"""Ops on saved tensors that wait on the host between a forward and its backward."""

from __future__ import annotations

from typing import Any

from megacompile.ir.ops.op import Show, Takes, Value, by_subject, op, unbound
from megacompile.ir.ops.sizes import of_arguments, of_value
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
def offload_saved(stage: Stage, value: Any) -> Any:
    """Copy what a stage's backward takes from the forward to the host, where it waits."""
    unbound(offload_saved)


@op(
    Stream.COMPUTE,
    by_subject,
    gives=Value.SAVED_BUFFER,
    takes=(Takes(1, Value.SAVED_ON_HOST),),
    owns=True,
    show=Show.QUIET,
)
def alloc_saved(stage: Stage, on_host: Any) -> Any:
    """Device memory for a value that waits on the host."""
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
    """Copy a value back to the device, once its `offload_saved` is done."""
    unbound(fetch_saved)
