"""The part of `verify` that is about what waits on the host between a forward and its backward.

What must hold, given [Note: happens-before] in `megacompile.verify.order`:

- every `offload` of a forward is a residual, and what a `fetch` brings back is one of those: the
  residual carries the event of its copy, so that the fetch comes behind it in whatever graph;
- a fetch fills room that was made for that value, and that no other fetch fills;
- nobody but the fetch and its room reads the copy on the host.

That a value is given back only behind its offload, and the copy on the host behind its fetch, is
shown by the lifetimes in `megacompile.verify.memory`; that each stage gets its own values, by
`megacompile.verify`, which looks through the fetch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.values import fetched_from, label, named, reads
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def _offloads_returned(view: View) -> Iterator[Hazard]:
    """What goes to the host is what the forward hands to the backward."""
    returned = set(view.graph.output_node().all_input_nodes)
    for node in view.nodes(ops.offload):
        if node not in returned:
            message = (
                f"{label(node)} copies {node.all_input_nodes[0].name} to the host, where no "
                f"backward finds it; return {node.name} as a residual"
            )
            yield view.hazard(HazardKind.OFFLOAD_LOST, node, None, message)


def _fetches_match(view: View) -> Iterator[Hazard]:
    """A fetch takes what an offload of the forward gives, to room of that value's own."""
    for node in view.nodes(ops.fetch):
        on_host: Any = node.args[1]
        room: Any = node.args[2]
        if fetched_from(view.schedule, node) is node:
            message = (
                f"{label(node)} takes {named(on_host)}, which no offload of the forward gives: "
                "nothing says when it is on the host; give it an offload's residual"
            )
            yield view.hazard(HazardKind.NOT_OFFLOADED, node, None, message)
        shared = [user for user in room.users if user.target is ops.fetch and user is not node]
        if room.target is not ops.alloc or room.args[1] is not on_host or shared:
            what = "that another fetch fills too" if shared else f"not made for {on_host.name}"
            message = f"{label(node)} fills memory {what}; alloc({on_host.name}) for it"
            yield view.hazard(HazardKind.WRONG_ROOM, node, None, message)


def _read_on_the_device(view: View) -> Iterator[Hazard]:
    """Computes take values in device memory."""
    forward = view.schedule.forward
    names = {node.name for node in ops.nodes_of(forward, ops.offload)}
    allowed = (ops.fetch, ops.alloc, ops.free, ops.park)
    for node in view.nodes():
        if node.target in allowed:
            continue
        for value in filter(lambda value: _on_host(value, names), reads(node)):
            message = (
                f"{label(node)} takes {value.name}, a copy on the host; give it the value, or what "
                "a fetch brings back"
            )
            yield view.hazard(HazardKind.ON_HOST, node, value, message)


def _on_host(value: fx.Node, names: set[str]) -> bool:
    return value.target is ops.offload or (value.op == "placeholder" and value.name in names)


CHECKS: tuple[Check, ...] = (_offloads_returned, _fetches_match, _read_on_the_device)
