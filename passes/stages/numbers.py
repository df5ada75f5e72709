"""Computes the numbers of traced graphs with symbolic sizes from the stage's own inputs.

    forward:  primals -> results, saved tensors, numbers        backward: saved, numbers, tangents
    after:    primals -> results, saved tensors                 backward: saved, primals, tangents

The partitioner saves numbers for the backward like tensors. Numbers are cheap, and a schedule's
saved values are tensors, so the backward recomputes them from the stage's number inputs.

A graph's values also get planned sizes, because the cost model reads ints.

`prepared` is for floats that change from call to call: Inductor accepts only tensors and ints.

    before: x, t (a float) -> h = t / 2; y = x * h
    after:  numbers:   x, t -> h = t / 2                   in Python, before each call
            the graph: x, h (a 0-d tensor on the host) -> y = mul_of_other(x, h)

The same applies to bools (`(t > 0.5) * x`) and ints computed from floats. An operator that takes
such a number becomes one of ours that reads the tensor: a 0-d tensor in its place would promote
dtypes differently. An int computed from ints through a float (half of a size) is passed as an int.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import Number, TensorMeta, Values, symbols_in
from megacompile.passes import edit

_FLOAT = "megacompile.float"  # in a node's meta: the float that is represented by a tensor
_OTHER_NAMES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_SLICES = (torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default)
_SCATTER = torch.ops.aten.slice_scatter.default
_VIEW = torch.ops.aten._unsafe_view.default  # a view that autograd does not track as one


def compute_ints(module: fx.GraphModule, primals: tuple[Any, ...]) -> fx.GraphModule:
    """Compute every int of a traced graph from its number inputs, in place. Otherwise the graph
    would take some tensors only to read their sizes. Floats keep their operations, and thus their
    rounding."""
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
                before.meta["val"] = edit.computed(before)
        edit.put(node, again[expression])
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
    """Make a backward compute the numbers that its forward would pass to it, except primals; in
    place. `joint` is the joint graph of both, after `compute_ints`."""
    graph = backward.graph
    sources = {node.name: node for node in joint.graph.nodes}
    inputs = {str(node.target): node for node in graph.find_nodes(op="placeholder")}

    def copied(original: fx.Node, first: fx.Node, body: fx.Node) -> Any:
        is_input = original.op == "placeholder"
        name = str(original.target) if is_input else original.name
        if name not in inputs and is_input:
            with graph.inserting_before(first):
                inputs[name] = graph.placeholder(name)
            inputs[name].meta = dict(original.meta)
        if name in inputs:
            return inputs[name]
        made = {n: copied(n, first, body) for n in original.all_input_nodes}
        with graph.inserting_before(body):
            return graph.node_copy(original, made.__getitem__)

    for name, node in list(inputs.items()):
        if compat.is_number(node.meta.get("val")) and not name.startswith("primals_"):
            del inputs[name]
            number = copied(sources[name], next(iter(graph.nodes)), edit.body_of(graph))
            node.replace_all_uses_with(number)
            graph.erase_node(node)
    backward.recompile()
    return backward


def sized(module: fx.GraphModule, values: Values) -> fx.GraphModule:
    """A copy of the graph whose values have these planned sizes next to their symbolic ones.
    `module`, whose values may have other planned sizes, is not changed."""
    graph = compat.copy_graph(module.graph)
    memo: dict[Any, Any] = {}
    with compat.fake_mode():
        for node in graph.nodes:
            if (value := edit.value_of(node)) is not None:
                node.meta[edit.SYMBOLIC] = value
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


def first_difference(symbolic: fx.GraphModule, plain: fx.GraphModule) -> str:
    """The first difference between a graph with symbols and one without, for the planned sizes.

    "" if both run the same operators in the same order, on values with the same sizes and strides.
    Aliases of a value do not count as operators.
    """
    ours, theirs = _work(symbolic.graph), _work(plain.graph)
    for (target, taken, looks), (other, wanted, expected) in zip(ours, theirs, strict=False):
        if target != other:
            return f"{target} replaces {other}"
        if taken != wanted:
            return f"{target} takes {taken} with symbols, {wanted} without"
        if looks != expected:
            return f"{target} returns other strides"
    return "" if len(ours) == len(theirs) else "one has more operators"


def _work(graph: fx.Graph) -> list[tuple[Any, str, Any]]:
    """(operator, arguments, description of the result) of each node that computes a tensor. In the
    arguments, numbers have their planned values, and a tensor is the number of its row."""
    names: dict[fx.Node, Any] = {}
    rows: list[tuple[Any, str, Any]] = []
    for node in graph.nodes:
        value, is_input = node.meta.get("val"), node.op == "placeholder"
        names[node] = f"%{len(rows)}"
        if compat.is_number(value):
            names[node] = compat.expression_of(value)[0]
        elif (named := _named(node)) is not None:
            names[node] = names[named]
            continue
        if is_input:
            rows.append((node.op, "", None))
        elif not compat.is_number(value):
            target = node.target if node.op == "call_function" else node.op
            target = torch.ops.aten.view.default if target is _VIEW else target
            given = fx.map_arg((node.args, node.kwargs), names.__getitem__)
            rows.append((target, repr(given), _looks(value)))
    return rows


def _named(node: fx.Node) -> fx.Node | None:
    """The value that a node aliases. A slice over a full dimension, its backward and writes to it
    are traced only if the size is unknown."""
    if node.target in _SLICES or node.target is _SCATTER:
        source = node.args[1 if node.target is _SCATTER else 0]
        assert isinstance(source, fx.Node)
        return source if _looks(node.meta["val"]) == _looks(source.meta["val"]) else None
    return node.all_input_nodes[0] if node.target in _OTHER_NAMES else None


def _looks(value: Any) -> Any:
    """The description of a value; ignores strides of dimensions of size 1."""
    if isinstance(value, torch.Tensor):
        meta = TensorMeta.of(value)
        sizes = zip(meta.shape, meta.stride, strict=True)
        return meta.shape, [0 if n == 1 else step for n, step in sizes], meta.dtype, meta.device
    return tuple(map(_looks, value)) if isinstance(value, (tuple, list)) else None


def resize(stages: Schedule, values: Values) -> Schedule:
    """The result of `partition`, with these planned values of all its symbols."""
    assert stages.symbols is not None
    new = edit.with_stages(
        stages,
        tuple(
            replace(stage, metas=at(stage.metas, values), outputs=at(stage.outputs, values))
            for stage in stages.stages
        ),
    )
    for node in new.forward.nodes:
        if "value" in node.meta:
            node.meta["value"] = at(node.meta["value"], values)
    return replace(new, symbols=replace(stages.symbols, planned=dict(values)))


def at(value: Any, values: Values) -> Any:
    """The metas in nested tuples, planned for other values of their symbols."""
    if isinstance(value, tuple):
        return tuple(at(item, values) for item in value)
    return value.at(values) if isinstance(value, (TensorMeta, Number)) else value


_WIDEST = {torch.SymFloat: torch.float64, torch.SymInt: torch.int64, torch.SymBool: torch.bool}


def check_floats(joint: fx.GraphModule) -> None:
    """Raise `UntraceableSymbols` if a traced graph uses a float in a way that `compiled` does not
    support: it determines a size, or an operator needs it in a list or as an int."""
    for node in joint.graph.nodes:
        sizes = [v for v in compat.leaves(edit.value_of(node)) if isinstance(v, torch.Tensor)]
        if any(_of_floats(TensorMeta.of(size).symbolic) for size in sizes):
            raise compat.UntraceableSymbols("a changing float determines a size")
        if any(map(_comes_as_tensor, _numbers_taken(node))) and _by_tensors(node) is None:
            raise compat.UntraceableSymbols(f"{node.target} takes a changing float")


def compiled(module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a traced graph, by Inductor."""
    graph, values, wrapped = prepared(module)
    return wrapped(compat.compile_inductor(graph, values))


def prepared(
    module: fx.GraphModule,
) -> tuple[fx.GraphModule, Sequence[Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """The module that Inductor compiles for a traced graph, its fake inputs, and a function that
    wraps Inductor's code into the graph's."""
    inputs = module.graph.find_nodes(op="placeholder")
    traced = compat.fakes_in(map(edit.value_of, inputs))
    ints = {s: n for s, n in traced.hints.items() if s.is_integer} if traced else {}
    as_tensors = any(map(_comes_as_tensor, module.graph.nodes))
    if traced is None or (len(ints) == len(traced.hints) and not as_tensors):
        return module, list(map(edit.value_of, inputs)), lambda function: function
    kept = [k for k, node in enumerate(inputs) if not _comes_as_tensor(node)]
    graph, read = _taking_tensors(module.graph)
    numbers: Callable[..., Sequence[float]] = fx.GraphModule(
        {}, edit.extracted(module.graph, read)
    ).forward
    dtypes = [_WIDEST[type(edit.value_of(n))] if _comes_as_tensor(n) else None for n in read]
    fakes = compat.SymbolicFakes(ints)  # torch would read the floats of `traced`
    with fakes:
        values = [_in(fakes, edit.value_of(inputs[k])) for k in kept]
        values += [
            torch.empty((), dtype=dtype, device="cpu") if dtype else _in(fakes, edit.value_of(node))
            for node, dtype in zip(read, dtypes, strict=True)
        ]

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        traced.require_of(fakes)

        def run(*given: Any) -> Any:
            pairs = zip(numbers(*given), dtypes, strict=True)
            made = (
                torch.tensor(n, dtype=dtype, device="cpu") if dtype else n for n, dtype in pairs
            )
            return function(*(given[k] for k in kept), *made)

        return run

    return fx.GraphModule(module, graph), values, wrapped


def _in(fakes: compat.SymbolicFakes, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return replace(TensorMeta.of(value), requires_grad=False).empty()
    return fakes.number(compat.expression_of(value)[1])


def _numbers_taken(node: fx.Node) -> Iterable[fx.Node]:
    """The number operands of a node that computes tensors."""
    if node.op != "call_function" or compat.is_number(edit.value_of(node)):
        return []
    return [source for source in node.all_input_nodes if compat.is_number(edit.value_of(source))]


def _comes_as_tensor(node: fx.Node) -> bool:
    """True if a node's value is a float, a bool, or an int computed from floats."""
    value = edit.value_of(node)
    if isinstance(value, torch.SymInt):
        return _of_floats(compat.expression_of(value)[1])
    return isinstance(value, (torch.SymFloat, torch.SymBool))


def _of_floats(expression: Any) -> bool:
    return any(not symbol.is_integer for symbol in symbols_in(expression))


def _by_tensors(node: fx.Node) -> Any:
    """The overload of a node's operator that takes tensors for such numbers; None if none does."""
    names = []
    for name, value in compat.arguments_of(node):
        if isinstance(value, fx.Node) and _comes_as_tensor(value):
            names.append(name)
        elif any(isinstance(v, fx.Node) and _comes_as_tensor(v) for v in compat.leaves(value)):
            return None
    return compat.taking_tensors(node.target, tuple(names)) if names else None


def _taking_tensors(old: fx.Graph) -> tuple[fx.Graph, list[fx.Node]]:
    """A copy of a graph that takes its floats, and numbers computed from them, as new last inputs;
    also returns the nodes that these replace."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    read: list[fx.Node] = []
    last: fx.Node | None = None  # input

    def taken(node: fx.Node) -> fx.Node:
        nonlocal last
        if node not in new:
            assert last is not None
            with graph.inserting_after(last):
                last = new[node] = graph.placeholder(f"number_{len(read)}")
            read.append(node)
        return new[node]

    for node in old.nodes:
        if any(map(_comes_as_tensor, _numbers_taken(node))):
            given = [fx.map_arg(value, taken) for _, value in compat.arguments_of(node)]
            new[node] = graph.call_function(_by_tensors(node), tuple(given))
        elif _comes_as_tensor(node):
            continue
        elif compat.is_number(edit.value_of(node)) and not new.keys() >= set(node.all_input_nodes):
            taken(node)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta.clear()  # set by its tracing mode and the partitioner
            last = new[node] if node.op == "placeholder" else last
    return graph, read
