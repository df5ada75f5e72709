"""The part of `verify` that is about what waits on the host between a forward and its backward.

What must hold, given [Note: happens-before] in `megacompile.verify.order`:

- every `offload_saved` of a forward is returned, and a `fetch_saved` brings back one of those: what
  is returned has the event of its copy, so that the fetch comes behind it in whatever graph;
- nobody but the fetch and its buffer reads the copy on the host.

That a value is given back only behind its offload, and the copy on the host behind its fetch, is
shown by the lifetimes in `megacompile.verify.memory`; that each stage gets its own values, by
`megacompile.verify`, which looks through the fetch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Value
from megacompile.ir.values import fetched_from, label, named, reads, taken
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def _offloads_returned(view: View) -> Iterator[Hazard]:
    """What goes to the host is what the forward hands to the backward."""
    returned = set(view.graph.output_node().all_input_nodes)
    for node in view.that(lambda op: op.to_backward):
        if node not in returned:
            message = (
                f"{label(node)} copies {node.all_input_nodes[0].name} to the host, where no "
                f"backward finds it; return {node.name} as a saved value"
            )
            yield view.hazard(HazardKind.OFFLOAD_LOST, node, None, message)


def _fetches_match(view: View) -> Iterator[Hazard]:
    """What is brought back is what the forward took to the host."""
    for node in view.that(lambda op: op.gives is Value.SAVED):
        on_host = taken(node, Value.SAVED_ON_HOST)
        assert on_host is not None
        if fetched_from(view.schedule, node) is node:
            message = (
                f"{label(node)} takes {named(on_host)}, which no offload of the forward gives: "
                "nothing says when it is on the host; give it an offload's saved value"
            )
            yield view.hazard(HazardKind.NOT_OFFLOADED, node, None, message)


def _read_on_the_device(view: View) -> Iterator[Hazard]:
    """Computes take values in device memory."""
    forward = view.schedule.forward
    waiting = ops.nodes_that(forward, lambda op: op.gives is Value.SAVED_ON_HOST)
    names = {node.name for node in waiting}
    for node in view.nodes():
        if ops.effects(node).frees is not None:
            continue
        allowed = taken(node, Value.SAVED_ON_HOST)
        for value in reads(node):
            if value is not allowed and _on_host(value, names):
                message = (
                    f"{label(node)} takes {value.name}, a copy on the host; give it the value, or "
                    "what a fetch brings back"
                )
                yield view.hazard(HazardKind.ON_HOST, node, value, message)


def _on_host(value: fx.Node, names: set[str]) -> bool:
    if value.op == "placeholder":
        return value.name in names
    return ops.effects(value).gives is Value.SAVED_ON_HOST


CHECKS: tuple[Check, ...] = (_offloads_returned, _fetches_match, _read_on_the_device)
