"""Ops that update a bucket where it is: in host memory, or resident on the device.

Of a bucket that a step does not update (it is another optimizer's, or got no gradient) those of
`optimizer.step()` do nothing.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from megacompile.ir.buckets import Bucket
from megacompile.ir.ops.op import Part, Show, Takes, Value, named, op, short, unbound, value_bytes
from megacompile.ir.stream import Stream

_READ = (Part.GRADIENTS, Part.WEIGHTS, Part.STATES)
_WRITTEN = (Part.WEIGHTS, Part.STATES)


@op(
    Stream.HOST,
    short("UPDATE"),
    gives=Value.DONE,
    reads=_READ,
    writes=_WRITTEN,
    is_update=True,
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
    is_update=True,
    show=Show.STEP,
)
def update_resident(bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Any:
    """The optimizer's step on a bucket that lives on the device."""
    unbound(update_resident)


def _in_place_traffic(node: fx.Node) -> int:
    """Parameters and states, read and written; gradients."""
    return 2 * value_bytes(node) + value_bytes(node.args[1])


@op(
    Stream.COMPUTE,
    short("UPDATE"),
    gives=Value.DONE,
    takes=(
        Takes(1, Value.GRADIENTS, ends=True),
        Takes(2, Value.NORMS, optional=True, like=1),
    ),
    reads=_WRITTEN,
    writes=_WRITTEN,
    is_update=True,
    show=Show.STEP,
    traffic=_in_place_traffic,
)
def update_in_place(
    bucket: Bucket, gradients: Any, norms: Any = None, *, after: tuple[Any, ...] = ()
) -> Any:
    """The optimizer's step in the backward on a bucket that lives on the device.

    It takes the gradients that the backward has made; parameters and states change where they are.
    The norms of the gradients stay on the device until they are asked for.
    """
    unbound(update_in_place)


@op(Stream.DEVICE, named, waits=False, helps=True)
def help_host(updates: tuple[Any, ...]) -> Any:
    """From now on the device makes, in chunks, those of these updates that the host has not begun.

    It takes the first one first. On either, the value of `update_host` marks its end.
    """
    unbound(help_host)
