"""The values of a schedule's graphs: who makes them, whose memory they are, who reads them."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule

MAKE_MEMORY = (  # ops whose value owns memory of the compute stream's allocator
    ops.snapshot,
    ops.alloc,
    ops.fetch,
    ops.alloc_grad,
    ops.fetch_grad,
    ops.add_grad,
    ops.norm_grad,
    ops.alloc_state,
    ops.fetch_state,
    ops.update,
)


def producer(node: fx.Node) -> fx.Node:
    """The op that gives a value: the item of a tuple comes from the op that gives the tuple."""
    while node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


_SHOWS = {  # op -> argument that it writes to
    ops.fetch: 2,
    ops.fetch_grad: 1,
    ops.add_grad: 1,
    ops.assign: 0,
    ops.fetch_state: 1,
    ops.update: 3,
}


def memory(node: fx.Node) -> fx.Node:
    """The value whose memory a node names: some ops give back, changed, what they were given.

    Fetched gradients fill their room, sums replace what was fetched, assigned inputs stay where
    they are.
    """
    seen = {node}  # values that are made of one another would lead around for ever
    while callable(node.target) and node.target in _SHOWS:
        source = node.args[_SHOWS[node.target]]
        if not isinstance(source, fx.Node) or source in seen:
            break
        seen.add(source)
        node = source
    return node


def reads(node: fx.Node) -> list[fx.Node]:
    """The values that a node takes; what it only waits for (`after=`) is not among them."""
    found: dict[fx.Node, None] = {}
    fx.map_arg(node.args, lambda n: found.setdefault(n))
    return list(found)


def fetched_from(schedule: Schedule, value: fx.Node) -> fx.Node:
    """The forward's value that a `fetch` of the backward brings back; any other value as it is.

    The two graphs share no edge: the offload is the residual that the backward's placeholder of
    the same name stands for, and what the runtime hands over there carries the copy's event.
    """
    if value.target is not ops.fetch:
        return value
    on_host: Any = value.args[1]
    for node in ops.nodes_of(schedule.forward, ops.offload):
        if on_host.op == "placeholder" and node.name == on_host.name:
            source: Any = node.args[1]
            assert isinstance(source, fx.Node)
            return source
    return value


def handed_over(graph: fx.Graph) -> set[fx.Node]:
    """The values whose memory `hand_over` takes: nobody in the schedule gives it back."""
    return {memory(value) for node in ops.nodes_of(graph, ops.hand_over) for value in reads(node)}


def label(value: fx.Node) -> str:
    """The printed name of the op that gives a value."""
    return ops.label(producer(value))


def named(value: fx.Node) -> str:
    """A value and where it comes from: "y3_0 of 3F"; the name alone for an input of the graph."""
    return value.name if value.op == "placeholder" else f"{value.name} of {label(value)}"
