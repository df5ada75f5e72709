"""Ops of `optimizer.step()` on what lies where it is: in host memory, or resident on the device.

Of a bucket that a step does not update (it is another optimizer's, or got no gradient) these ops
do nothing.
"""

from __future__ import annotations

from typing import Any

from megacompile.ir.buckets import Bucket
from megacompile.ir.ops.op import Part, Show, Value, named, op, short, unbound
from megacompile.ir.stream import Stream

_READ = (Part.GRADIENTS, Part.WEIGHTS, Part.STATES)
_WRITTEN = (Part.WEIGHTS, Part.STATES)


@op(
    Stream.HOST,
    short("UPDATE"),
    gives=Value.DONE,
    reads=_READ,
    writes=_WRITTEN,
    once=True,
    show=Show.STEP,
)
def update_host(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """The optimizer's step on a bucket in host memory, by a thread of the host."""
    unbound(update_host)


@op(
    Stream.COMPUTE,
    short("UPDATE"),
    gives=Value.DONE,
    reads=_READ,
    writes=_WRITTEN,
    once=True,
    show=Show.STEP,
)
def update_resident(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """The optimizer's step on a bucket that lives on the device."""
    unbound(update_resident)


@op(Stream.DEVICE, named, waits=False, helps=True)
def help_host(updates: tuple[Any, ...]) -> Any:
    """From now on the device makes, in chunks, those of these updates that the host has not begun.

    It takes the last one first. Whoever makes an update, what `update_host` gave is its end.
    """
    unbound(help_host)
