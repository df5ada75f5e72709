"""Ops that update a bucket in place: in host memory, or resident on the device.

The ops of `optimizer.step()` do nothing for a bucket that the step does not update (it belongs to
another optimizer or has no gradient).
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
    """Run the optimizer's step on a bucket in host memory, in a host thread."""
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
    """Run the optimizer's step on a resident bucket."""
    unbound(update_resident)


def _in_place_traffic(node: fx.Node) -> int:
    """Bytes of parameters and states, read and written, and of gradients."""
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
    """Run the optimizer's step in the backward on a resident bucket.

    It consumes the backward's gradients; parameters and states change in place. The gradient norms
    stay on the device until requested.
    """
    unbound(update_in_place)


@op(Stream.DEVICE, named, waits=False, helps=True)
def help_host(updates: tuple[Any, ...]) -> Any:
    """Start device help: the device runs, in chunks, updates that the host has not started.

    The device takes them in order. For both workers, the value of `update_host` marks completion.
    """
    unbound(help_host)
