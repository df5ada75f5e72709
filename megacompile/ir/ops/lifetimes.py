"""Ops that free memory."""

from __future__ import annotations

from typing import Any

from megacompile.ir.ops.op import Show, Takes, named, op, unbound
from megacompile.ir.stream import Stream


@op(
    Stream.COMPUTE,
    named,
    takes=(Takes(0),),
    frees=0,
    waits=False,
    issues=False,
    show=Show.QUIET,
)
def defer_free(value: Any, *, after: tuple[Any, ...] = ()) -> None:
    """Hold a value until `after` is done or the next `drain`; no stream waits here."""
    unbound(defer_free)


@op(Stream.COMPUTE, named, drains=True)
def drain() -> Any:
    """Free memory that earlier graphs deferred: the compute stream waits for the copies from it.

    It runs in a forward, half a schedule after those copies. Nothing in its graph reads that
    memory, so it names no value. Optional; without it the memory is freed later.
    """
    unbound(drain)


@op(Stream.COMPUTE, named, takes=(Takes(0),), frees=0, issues=False, show=Show.QUIET)
def free(value: Any, *, after: tuple[Any, ...] = ()) -> None:
    """Free a value's memory once `after` (readers on other streams) is done."""
    unbound(free)
