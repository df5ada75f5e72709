"""Small edits of a schedule's graphs that several passes make."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.nodes import set_args
from megacompile.ir.schedule import Schedule


def add_item(graph: fx.Graph, call: fx.Node, index: int, name: str) -> fx.Node:
    """`call[index]`, named; its meta is that part of the call's."""
    item = compat.new_node(graph, "call_function", operator.getitem, name, (call, index))
    value = call.meta.get("value")
    item.meta["value"] = value[index] if isinstance(value, tuple) and index < len(value) else None
    return item


def saved_value(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """The value that the backward takes to have `value` as the forward read it.

    That is the value itself, or a snapshot where an input is changed in place, by a stage's
    backward too (`Schedule.written`):

        before: 3F ASSIGN(x)        after: 3F SNAPSHOT(x) ASSIGN(x)
    """
    assigns = [n for n in value.users if n.target is ops.assign and n.args[0] is value]
    if not assigns and not value.meta.get("written"):
        return value
    there = value_that_is_saved(value)
    if there is not value:
        return there
    body = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(assigns[0] if assigns else body):
        copy = ops.call(graph, ops.snapshot, value, name=f"{value.name}_old")
    copy.meta["value"] = value.meta.get("value")
    return copy


def value_that_is_saved(value: fx.Node) -> fx.Node:
    """The snapshot of a value, where there is one already; else itself."""
    return next((user for user in value.users if user.target is ops.snapshot), value)


class Placeholders:
    """Those of a backward, found by name: a graph has thousands of nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        existing: list[fx.Node] = graph.find_nodes(op="placeholder")
        self._by_name = {str(node.target): node for node in existing}

    def find(self, name: str) -> fx.Node | None:
        """That of a name, if there is one."""
        return self._by_name.get(name)

    def of(self, source: fx.Node) -> fx.Node:
        """That for a saved value, made where there is none; those come first."""
        if source.name not in self._by_name:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                made: fx.Node = self.graph.placeholder(source.name)
            made.meta["value"] = source.meta.get("value")
            self._by_name[source.name] = made
        return self._by_name[source.name]

    def replace(self, placeholder: fx.Node, value: fx.Node) -> None:
        """Uses `value` instead of a placeholder, which it erases."""
        placeholder.replace_all_uses_with(value)
        self.graph.erase_node(placeholder)
        del self._by_name[str(placeholder.target)]


def set_saved_values(schedule: Schedule, names: Sequence[str]) -> Schedule:
    """Set what the forward hands to the backward; `schedule` is a copy that may be changed."""
    by_name = {node.name: node for node in schedule.forward.nodes}
    output = schedule.forward.output_node()
    outputs, _ = ops.returned(schedule.forward)
    set_args(output, ((outputs, tuple(by_name[name] for name in names)),))
    return replace(schedule, saved_values=tuple(names))
