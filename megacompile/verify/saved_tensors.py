"""The part of `verify` that is about what waits elsewhere between a forward and its backward.

What must hold, given [Note: happens-before] in `megacompile.ir.edges`:

- every `offload_saved` of a forward is returned, or written to a disk and that is returned, and a
  `fetch_saved` brings back one of those: what is returned has the event of its copy, so that the
  fetch comes after it in whatever graph;
- only the fetch and its buffer read the copy on the host, and only `read_saved` that on a disk;
- a buffer that values pass through on their way to a disk or back is given back once, and no more
  of them are taken than there are.

That a value is given back only after its offload, and the copy on the host after its fetch, is
shown by the lifetimes in `megacompile.verify.memory`; that each stage gets its own values, by
`megacompile.verify`, which looks through the fetch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Value
from megacompile.ir.signature import elsewhere
from megacompile.ir.values import copied_away, fetched_from, label, named, reads, taken
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def _offloads_returned(view: View) -> Iterator[Hazard]:
    """Checks that what goes to the host or to a disk is what the forward hands to the backward."""
    returned = set(view.graph.output_node().all_input_nodes)
    for node in view.that(lambda op: op.to_backward):
        if node not in returned and not _written(node):
            message = (
                f"{label(node)} copies {node.all_input_nodes[0].name} away, where no "
                f"backward finds it; return {node.name} as a saved value"
            )
            yield view.hazard(HazardKind.OFFLOAD_LOST, node, None, message)


def _fetches_match(view: View) -> Iterator[Hazard]:
    """Checks that what is brought back, by way of a disk or not, is what the forward took away."""
    copies = copied_away(view.schedule)
    for node in view.that(lambda op: op.gives is Value.SAVED):
        on_host = taken(node, Value.SAVED_ON_HOST)
        assert on_host is not None
        if fetched_from(copies, node) is node:
            message = (
                f"{label(node)} takes {named(on_host)}, which no offload of the forward gives: "
                "nothing says when it is on the host; give it an offload's saved value, or a read "
                "of what the forward has written to a disk"
            )
            yield view.hazard(HazardKind.NOT_OFFLOADED, node, None, message)


def _read_on_the_device(view: View) -> Iterator[Hazard]:
    """Computes take values in device memory."""
    names = elsewhere(view.schedule.forward)
    for node in view.nodes():
        if ops.effects(node).frees is not None:
            continue
        allowed = taken(node, Value.SAVED_ON_HOST), taken(node, Value.SAVED_ON_DISK)
        for value in reads(node):
            if value not in allowed and _is_elsewhere(value, names):
                message = (
                    f"{label(node)} takes {value.name}, a copy on the host or on a disk; give it "
                    "the value, or what a fetch brings back"
                )
                yield view.hazard(HazardKind.ON_HOST, node, value, message)


def _is_elsewhere(value: fx.Node, names: dict[str, str]) -> bool:
    if value.op == "placeholder":
        return value.name in names
    return ops.effects(value).gives in (Value.SAVED_ON_HOST, Value.SAVED_ON_DISK)


def _buffers(view: View) -> Iterator[Hazard]:
    """Buffers on the way to a disk and back: each is given back once, and there are enough."""
    lent: list[fx.Node] = []  # the ops that return them
    sets = view.schedule.plan.saved_sets
    for node in view.that(lambda op: op.gives is Value.SAVED_ON_HOST):
        if taken(node, Value.SAVED_ON_DISK) is None and not _written(node):
            continue  # it waits on the host
        users = [user for user in node.users if node in reads(user)]
        if len(users) != 1:
            others = ", ".join(map(label, users)) or "nobody"
            message = (
                f"{label(node)} takes a buffer that one op gives back, and its value is for "
                f"{others}; give it to that op alone"
            )
            yield view.hazard(HazardKind.WRONG_BUFFER, node, None, message)
            continue
        taken_still = [end for end in lent if not view.order.before(end, node)]
        if len(taken_still) >= sets:
            end = taken_still[0]
            message = (
                f"{label(node)} takes a buffer before {label(end)} has given one back, of {sets}; "
                f"add after=({end.name},) to it"
            )
            yield view.hazard(HazardKind.TOO_MANY_BUFFERS, node, end, message)
        lent.append(users[0])


def _written(copy: fx.Node) -> bool:
    """True if a copy goes on to a disk."""
    return any(taken(user, Value.SAVED_ON_HOST) is copy for user in copy.users if _stores(user))


def _stores(node: fx.Node) -> bool:
    return ops.effects(node).gives is Value.SAVED_ON_DISK


CHECKS: tuple[Check, ...] = (_offloads_returned, _fetches_match, _read_on_the_device, _buffers)
