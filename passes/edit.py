"""Graph edits that several passes share: on captured and traced graphs, then on schedules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, largest_shard
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.tensors import Number, TensorMeta

# Operators whose results have the values of their input.
SAME_VALUES = {"t", "view", "transpose", "permute", "expand", "reshape", "unsqueeze", "squeeze"}
SAME_VALUES |= {"slice", "select", "alias", "detach", "_unsafe_view", "clone", "_to_copy"}
SAME_VALUES |= {"convert_element_type"}

SYMBOLIC = "megacompile.symbolic"  # in a traced node's meta: its value with symbols


def value_of(node: fx.Node) -> Any:
    """The value of a traced node, with symbols if it has any."""
    return node.meta.get(SYMBOLIC, node.meta.get("val"))


class NotComputedError(Exception):
    """The value of a traced node cannot be computed from its arguments."""


def computed(node: fx.Node) -> Any:
    """The value of a traced node, recomputed from the fake values of its arguments. Raises
    NotComputedError if an argument has no value, or the operator rejects it."""
    assert callable(node.target)
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with torch.no_grad():
            return node.target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise NotComputedError(str(node)) from error


def put(node: fx.Node, value: Any) -> None:
    """Replace all uses of a node by `value`, another node or a constant."""
    for user in list(node.users):
        user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)


def written(graph: fx.Graph, value: Any, symbols: Mapping[sympy.Symbol, fx.Node]) -> Any:
    """A value as an argument at the graph's insertion point. Numbers that change from call to call
    are computed from the graph's number inputs."""
    if isinstance(value, Number):
        return compat.reified(graph, value.expression, symbols)
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(written(graph, part, symbols) for part in parts))
    if isinstance(value, (tuple, list)):
        return tuple(written(graph, item, symbols) for item in value)
    return value


def needed_for(outputs: Iterable[Any]) -> set[fx.Node]:
    """The nodes that `outputs` are computed from, themselves included."""
    needed: set[fx.Node] = set()
    stack = [n for n in outputs if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def extracted(
    graph: fx.Graph, outputs: Sequence[Any], placeholders: Iterable[fx.Node] | None = None
) -> fx.Graph:
    """The part of a graph that computes `outputs`, with these placeholders (default: all), needed
    or not."""
    part = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    needed = needed_for(outputs)
    needed.update(graph.find_nodes(op="placeholder") if placeholders is None else placeholders)
    for node in graph.nodes:
        if node in needed:
            env[node] = part.node_copy(node, env.__getitem__)
    part.output(tuple(env[n] if isinstance(n, fx.Node) else n for n in outputs))
    return part


def copied(schedule: Schedule) -> tuple[Schedule, fx.Graph]:
    """A copy of a schedule, and its backward."""
    new = schedule.copy()
    assert new.backward is not None
    return new, new.backward


def last_item(call: fx.Node) -> fx.Node:
    """The last `getitem` of an op's results, or the op itself."""
    return max((item for _, item in ops.items(call)), default=call)


def body_of(graph: fx.Graph) -> fx.Node:
    """The first node of a graph after its placeholders."""
    body: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return body


def wait_for(node: fx.Node, other: fx.Node) -> None:
    """Add `other` to the ops that `node` names in `after=`."""
    named: Any = node.kwargs.get("after", ())
    compat.set_kwargs(node, {**node.kwargs, "after": (*named, other)})


def trained_bytes(
    schedule: Schedule, bucket: Bucket, item_bytes: Callable[[int], float]
) -> TensorMeta:
    """The meta of a byte tensor as large as a bucket's trained parameters, or their states, by the
    bytes that `item_bytes` returns for those of a streamed element."""
    mine = largest_shard(bucket)
    params = [mine.params[i] for i in schedule.gradient_params[bucket.key]]
    size = sum(param.numel * item_bytes(param.dtype.itemsize) for param in params)
    return TensorMeta((int(size),), torch.uint8, (1,))


def add_item(graph: fx.Graph, call: fx.Node, index: int, name: str) -> fx.Node:
    """`call[index]`, with a name; its meta is that item of the call's meta."""
    item = compat.new_node(graph, "call_function", operator.getitem, name, (call, index))
    value = call.meta.get("value")
    item.meta["value"] = value[index] if isinstance(value, tuple) and index < len(value) else None
    return item


def saved_value(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """The value with which the backward reads `value` as the forward did.

    It is the value itself, or a snapshot if the value is an input that is changed in place:

        before: 3F ASSIGN(x)        after: 3F SNAPSHOT(x) ASSIGN(x)
    """
    assigns = [n for n in value.users if n.target is ops.assign and n.args[0] is value]
    if not assigns:
        return value
    snapshot = value_that_is_saved(value)
    if snapshot is not value:
        return snapshot
    with graph.inserting_before(assigns[0]):
        copy = ops.call(graph, ops.snapshot, value, name=f"{value.name}_old")
    copy.meta["value"] = value.meta.get("value")
    return copy


def value_that_is_saved(value: fx.Node) -> fx.Node:
    """The existing snapshot of a value; without one, the value itself."""
    return next((user for user in value.users if user.target is ops.snapshot), value)


class Placeholders:
    """The placeholders of a backward, found by name: a graph has thousands of nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        existing: list[fx.Node] = graph.find_nodes(op="placeholder")
        self.by_name = {str(node.target): node for node in existing}

    def of(self, source: fx.Node) -> fx.Node:
        """The placeholder of a saved value; a new one becomes the first node."""
        if source.name not in self.by_name:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                made: fx.Node = self.graph.placeholder(source.name)
            made.meta["value"] = source.meta.get("value")
            self.by_name[source.name] = made
        return self.by_name[source.name]

    def replace(self, placeholder: fx.Node, value: fx.Node) -> None:
        """Replace a placeholder by `value` and erase it."""
        placeholder.replace_all_uses_with(value)
        self.graph.erase_node(placeholder)
        del self.by_name[str(placeholder.target)]


def set_saved_values(schedule: Schedule, names: Sequence[str]) -> Schedule:
    """Set the forward's saved values, by name; changes the graphs of `schedule`, a copy."""
    by_name = {node.name: node for node in schedule.forward.nodes}
    output = schedule.forward.output_node()
    outputs, _ = ops.returned(schedule.forward)
    compat.set_args(output, ((outputs, tuple(by_name[name] for name in names)),))
    return replace(schedule, saved_values=tuple(names))


def with_stages(schedule: Schedule, stages: tuple[Stage, ...]) -> Schedule:
    """A copy of the schedule with other stage objects, in its graphs too."""
    new = replace(schedule.copy(), stages=stages)
    for graph in new.graphs.values():
        for node in graph.nodes:
            if node.args and isinstance(node.args[0], Stage):
                compat.set_args(node, (stages[node.args[0].index], *node.args[1:]))
    return new
