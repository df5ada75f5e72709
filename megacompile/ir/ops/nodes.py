"""Nodes of a schedule's graphs: creation and queries."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops.op import NO_OP, OPS, Op, Show
from megacompile.ir.stages import Code
from megacompile.ir.stream import Stream


def call(
    graph: fx.Graph,
    op: Callable[..., Any],
    *args: Any,
    name: str | None = None,
    after: tuple[fx.Node, ...] | None = None,
) -> fx.Node:
    """Add a node that calls an op, at the graph's insertion point.

    `create_node` searches each argument for symbols, and a plan search creates a million nodes.
    """
    kwargs = {} if after is None else {"after": after}
    if name is not None:
        return compat.new_node(graph, "call_function", op, name, args, kwargs)
    node = graph.create_node("call_function", op)
    compat.set_args(node, args)
    compat.set_kwargs(node, kwargs)
    return node


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node, which may be stages, buckets and slots."""
    return node.args


def bucket_of(node: fx.Node) -> Bucket:
    """The bucket of a node: the first argument of all bucket ops."""
    bucket: Bucket = arguments(node)[0]
    return bucket


def returned(graph: fx.Graph) -> Any:
    """The results of a graph: (outputs, saved values) of a forward; (gradients of inputs, values
    left for the update, tokens) of a backward; (tokens,) of an update."""
    return graph.output_node().args[0]


def op_of(node: fx.Node) -> Op | None:
    """The op that a node calls; None for placeholders, outputs and `getitem`."""
    target: Any = node.target
    op = OPS.get(target)
    if op is None and node.op == "call_function" and target is not operator.getitem:
        raise KeyError(target)
    return op


def effects(node: fx.Node) -> Op:
    """The op that a node calls; one without effects for placeholders, outputs and `getitem`."""
    target: Any = node.target
    return OPS.get(target) or op_of(node) or NO_OP


def copied_bytes(node: fx.Node) -> int:
    """Bytes that an op moves between host and device."""
    copied = effects(node).copied
    return 0 if copied is None else copied(node)


def stored_bytes(node: fx.Node) -> int:
    """Bytes that an op moves between a disk and host memory."""
    stored = effects(node).stored
    return 0 if stored is None else stored(node)


def stream_of(node: fx.Node) -> Stream:
    """The stream that a node runs on; items and placeholders belong to the compute stream."""
    op = op_of(node)
    return Stream.COMPUTE if op is None else op.stream


def label(node: fx.Node) -> str:
    """The printed name of a node: "3PREFETCH@1", "3F"; the value's name if it has no op."""
    op = op_of(node)
    return node.name if op is None else op.label(node.args)


def nodes_that(graph: fx.Graph, wanted: Callable[[Op], object]) -> list[fx.Node]:
    """The nodes whose op has an effect, in program order: `nodes_that(g, lambda op: op.code)`."""
    targets = [target for target, op in OPS.items() if wanted(op)]
    return nodes_of(graph, *targets) if targets else []


def nodes_of(graph: fx.Graph, *targets: Callable[..., Any]) -> list[fx.Node]:
    """The nodes that call one of `targets` (every op without targets), in program order.

    With targets, uses the graph's table; without targets, scans all nodes.
    """
    if not targets:
        return [n for n in graph.nodes if n.target in OPS]
    if len(targets) == 1:
        return list(graph.find_nodes(op="call_function", target=targets[0]))
    each = (graph.find_nodes(op="call_function", target=t, sort=False) for t in targets)
    return sorted(itertools.chain.from_iterable(each))


def calls_by_stage(graph: fx.Graph, target: Callable[..., Any]) -> dict[int, fx.Node]:
    """The nodes that call `target`, by the index of their stage."""
    return {arguments(node)[0].index: node for node in nodes_of(graph, target)}


def code_of(node: fx.Node) -> Code:
    """The template code that a compute node runs."""
    code = effects(node).code
    assert code is not None, f"{label(node)} runs no template"
    return code(node.args)


def items(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The `getitem` users of a node that returns a tuple, as (index, item)."""
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem:
            index = user.args[1]
            assert isinstance(index, int)
            yield index, user


def actions(graph: fx.Graph) -> str:
    """The graph as one line of labels: "0PREFETCH@0 0F"; omits allocations and frees."""
    found = ((node, op_of(node)) for node in nodes_of(graph))
    return " ".join(label(n) for n, op in found if op is not None and op.show is not Show.QUIET)
