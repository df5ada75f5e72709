"""Computes the numbers of traced graphs with symbolic sizes from the stage's own inputs.

    forward:  primals -> results, saved tensors, numbers        backward: saved, numbers, tangents
    after:    primals -> results, saved tensors                 backward: saved, primals, tangents

The partitioner saves numbers for the backward like tensors. Numbers are cheap, and a schedule's
saved values are tensors, so the backward recomputes them from the stage's number inputs.

A graph's values also get planned sizes, because the cost model reads ints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from megacompile import compat
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import Number, TensorMeta, Values, planned_of
from megacompile.passes.edit import SYMBOLIC, body_of, computed, put, value_of, with_stages

_FLOAT = "megacompile.float"  # in a node's meta: the float that is represented by a tensor
_OTHER_NAMES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_SLICES = (torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default)
_SCATTER = torch.ops.aten.slice_scatter.default


def compute_ints(module: fx.GraphModule, primals: tuple[Any, ...]) -> fx.GraphModule:
    """Compute every int of a traced graph from its number inputs, in place. Otherwise it would take
    tensors only to read their sizes. Floats keep their operations, and so their rounding."""
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    numbers = {
        meta.expression: node
        for node, meta in zip(placeholders, primals, strict=False)
        if isinstance(meta, Number)
    }
    again: dict[Any, Any] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.SymInt):
            continue
        _, expression = compat.expression_of(node.meta["val"])
        if expression not in again:
            before = node.prev
            with graph.inserting_before(node):
                again[expression] = compat.reified(graph, expression, numbers)
            while before.next is not node:
                before = before.next
                before.meta["val"] = computed(before)
        put(node, again[expression])
    graph.eliminate_dead_code()
    module.recompile()
    return module


def floats_as_tensors(joint: fx.GraphModule) -> None:
    """Replace floats by one-element tensors, in place: the partitioner supports only symbolic
    ints."""
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymFloat):
            node.meta[_FLOAT] = value
            with compat.fakes_of(value):
                node.meta["val"] = torch.empty((), dtype=torch.float64)


def restore_floats(module: fx.GraphModule) -> None:
    """Undo `floats_as_tensors` in a subgraph."""
    for node in module.graph.nodes:
        if _FLOAT in node.meta:
            node.meta["val"] = node.meta.pop(_FLOAT)


def without_numbers(backward: fx.GraphModule, joint: fx.GraphModule) -> fx.GraphModule:
    """Make a backward recompute the numbers from its forward, except primals; in place. `joint` is
    its joint graph, after `compute_ints`."""
    graph = backward.graph
    sources = {node.name: node for node in joint.graph.nodes}
    for node in graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if compat.is_number(node.meta.get("val")) and not name.startswith("primals_"):
            _recomputed(graph, node, sources[name])
    backward.recompile()
    return backward


def _recomputed(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    """Replace a number's placeholder by its computation."""
    placeholders = {str(n.target): n for n in graph.find_nodes(op="placeholder")}
    first = next(iter(graph.nodes))
    body = body_of(graph)

    def copied(original: fx.Node) -> Any:
        name = str(original.target) if original.op == "placeholder" else original.name
        if name in placeholders and placeholders[name] is not node:
            return placeholders[name]
        if original.op == "placeholder":
            with graph.inserting_before(first):
                placeholders[name] = graph.placeholder(name)
            placeholders[name].meta = dict(original.meta)
            return placeholders[name]
        made = {n: copied(n) for n in original.all_input_nodes}
        with graph.inserting_before(body):
            return graph.node_copy(original, made.__getitem__)

    node.replace_all_uses_with(copied(source))
    graph.erase_node(node)


def sized(module: fx.GraphModule, values: Values) -> fx.GraphModule:
    """A graph whose values have these planned sizes in addition to their symbols. `module`, which
    may have others, is not changed."""
    graph = compat.copy_graph(module.graph)
    memo: dict[Any, Any] = {}
    with compat.fake_mode():
        for node in graph.nodes:
            if (value := value_of(node)) is not None:
                node.meta[SYMBOLIC] = value
                node.meta["val"] = compat.tree_map(lambda v: _sized(v, values, memo), value)
    return compat.graph_module(module, graph)


def _sized(value: Any, values: Values, memo: dict[Any, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        meta = TensorMeta.of(value)
        if meta not in memo:
            memo[meta] = replace(meta.at(values), requires_grad=False).empty()
        return memo[meta]
    if compat.is_number(value):
        return compat.evaluated(compat.expression_of(value)[1], values)
    return value


def numbers_of(primals: Iterable[Any]) -> dict[sympy.Symbol, int | float]:
    """The planned values of a stage's inputs, by symbol."""
    return planned_of([meta for meta in primals if isinstance(meta, Number)])


def first_difference(symbolic: fx.GraphModule, plain: fx.GraphModule) -> str:
    """The first difference between a graph with symbols and one without, for the planned sizes.

    "" if both run the same operators in the same order, on values with the same sizes and strides.
    Aliases of a value do not count as operators.
    """
    ours, theirs = _work(symbolic.graph), _work(plain.graph)
    mine = {node: f"%{k}" for k, node in enumerate(ours)}
    other_names = {node: f"%{k}" for k, node in enumerate(theirs)}
    for node, other in zip(ours, theirs, strict=False):
        if node.op != other.op or (node.op == "call_function" and node.target != other.target):
            return f"{node.target} replaces {other.target}"
        if node.op == "placeholder":
            continue
        taken, wanted = _taken(node, mine), _taken(other, other_names)
        if taken != wanted:
            return f"{node.target} takes {taken} with symbols, {wanted} without"
        if _looks(node.meta.get("val")) != _looks(other.meta.get("val")):
            return f"{node.target} returns other strides"
    return "" if len(ours) == len(theirs) else "one has more operators"


def _work(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute tensors."""
    return [
        node
        for node in graph.nodes
        if node.op == "placeholder"
        or not (compat.is_number(node.meta.get("val")) or _named(node) is not None)
    ]


def _named(node: fx.Node) -> fx.Node | None:
    """The value that a node aliases, with the same elements in the same order.

    A slice over a full dimension, its backward and writes to it are traced only if the size is
    unknown.
    """
    if node.target in _SLICES or node.target is _SCATTER:
        source = node.args[1 if node.target is _SCATTER else 0]
        assert isinstance(source, fx.Node)
        return source if _looks(node.meta["val"]) == _looks(source.meta["val"]) else None
    return node.all_input_nodes[0] if node.target in _OTHER_NAMES else None


def _taken(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """A node's arguments: planned numbers, and values by their computation."""

    def value(source: fx.Node) -> Any:
        number = source.meta.get("val")
        if compat.is_number(number):
            return compat.expression_of(number)[0]
        while (named := _named(source)) is not None:
            source = named
        return names[source]

    return repr(fx.map_arg((node.args, node.kwargs), value))


def _looks(value: Any) -> Any:
    """The description of a value; ignores strides of dimensions of size 1."""
    if isinstance(value, torch.Tensor):
        meta = TensorMeta.of(value)
        sizes = zip(meta.shape, meta.stride, strict=True)
        return meta.shape, [0 if n == 1 else step for n, step in sizes], meta.dtype, meta.device
    return tuple(map(_looks, value)) if isinstance(value, (tuple, list)) else None


# Stages for other values of their symbols.


def resize(stages: Schedule, values: Values) -> Schedule:
    """The result of `partition`, with these planned values of all its symbols."""
    assert stages.symbols is not None
    new = with_stages(
        stages,
        tuple(
            replace(
                stage,
                metas=tuple(meta.at(values) for meta in stage.metas),
                outputs=tuple(meta.at(values) for meta in stage.outputs),
            )
            for stage in stages.stages
        ),
    )
    for node in new.forward.nodes:
        if "value" in node.meta:
            node.meta["value"] = _at(node.meta["value"], values)
    return replace(new, symbols=replace(stages.symbols, planned=dict(values)))


def _at(value: Any, values: Values) -> Any:
    if isinstance(value, tuple):
        return tuple(_at(item, values) for item in value)
    return value.at(values) if isinstance(value, (TensorMeta, Number)) else value
