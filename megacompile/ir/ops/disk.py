"""Ops that copy a bucket's states and parameters between a disk and host memory.

A bucket in `plan.on_disk` has its states on a disk. Between `read_state` and the end of
`write_state` they are in a page-locked host buffer, which all ops on these states use.

A bucket in `plan.weights_on_disk` also has its parameters there. Each prefetch copies from a
separate buffer, filled by its `read_weights` and free after the copy. A host update changes the
trained parameters in the buffer filled by `read_trained`. A device update writes the new parameters
to a buffer too. In both cases the buffer is free at the end of `write_weights`.
"""

from __future__ import annotations

from typing import Any

from megacompile.ir.buckets import Bucket
from megacompile.ir.ops.op import Part, Value, by_subject, of_bucket, of_value, op, unbound
from megacompile.ir.stream import Stream


@op(
    Stream.READ,
    by_subject,
    gives=Value.DONE,
    reads=(Part.STATES,),
    stored=of_value(),
)
def read_state(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Read a bucket's optimizer states into a buffer, once one is free."""
    unbound(read_state)


@op(
    Stream.WRITE,
    by_subject,
    gives=Value.DONE,
    writes=(Part.STATES,),
    stored=of_value(),
)
def write_state(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Write a bucket's new optimizer states to the disk; then their buffer is free."""
    unbound(write_state)


@op(
    Stream.READ,
    by_subject,
    gives=Value.DONE,
    reads=(Part.WEIGHTS,),
    stored=of_bucket,
)
def read_weights(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Read a bucket's parameters into a free buffer, for the one prefetch that names this op."""
    unbound(read_weights)


@op(
    Stream.READ,
    by_subject,
    gives=Value.DONE,
    reads=(Part.WEIGHTS,),
    stored=of_value(),
)
def read_trained(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Read the parameters that a host update changes into a free buffer."""
    unbound(read_trained)


@op(
    Stream.WRITE,
    by_subject,
    gives=Value.DONE,
    writes=(Part.WEIGHTS,),
    stored=of_value(),
)
def write_weights(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Write a bucket's new parameters to the disk; then their buffer is free."""
    unbound(write_weights)
