"""Ops that bring the states and the parameters of a bucket from a disk to host memory, and back.

A bucket of `plan.on_disk` has its states on a disk. They are in a buffer of page-locked host memory
between `read_state` and the end of `write_state`, and every op in between that reads or writes the
states of that bucket does it there.

A bucket of `plan.weights_on_disk` has its parameters there. Each prefetch copies from a buffer of
its own, which its `read_weights` has filled; the buffer is free after the copy. An update on the
host changes the trained parameters where `read_trained` has brought them. One on the device leaves
the new ones in a buffer too. In both cases the buffer is free at the end of `write_weights`.
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
    """Read a bucket's optimizer states into a buffer that is free, when there is one."""
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
    """Read a bucket's parameters into a buffer that is free, for the one prefetch that names it."""
    unbound(read_weights)


@op(
    Stream.READ,
    by_subject,
    gives=Value.DONE,
    reads=(Part.WEIGHTS,),
    stored=of_value(),
)
def read_trained(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """Read those parameters of a bucket that an update on the host changes into a free buffer."""
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
