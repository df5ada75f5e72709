"""Ops that bring the optimizer states of a bucket from a disk to host memory, and back.

A bucket of `plan.on_disk` has its states on a disk. They are in a buffer of page-locked host memory
between `read_state` and the end of `write_state`, and every op in between that reads or writes the
states of that bucket does it there.
"""

from __future__ import annotations

from typing import Any

from megacompile.ir.buckets import Bucket
from megacompile.ir.ops.op import Part, Value, by_subject, op, unbound
from megacompile.ir.ops.sizes import of_value
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
