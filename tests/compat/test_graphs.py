"""Facts about FX graphs and compile regions that compat relies on."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn

from megacompile import compat

NAMES = ("x3", "x3", "x3_1", "x", "x_1", "x_2", "input", "input_1", "class", "3x", "a.b1", "é1")


def made(new: bool) -> fx.Graph:
    graph = fx.Graph()
    first = graph.placeholder("first")
    for name in NAMES:
        with graph.inserting_after(first):
            if new:
                node = compat.new_node(graph, "call_function", operator.neg, name)
            else:
                node = graph.create_node("call_function", operator.neg, name=name)
        node.args = (first,)
    graph.output(node)
    return graph


def test_powers_of_negative_numbers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(operator.pow, (base, x)) for base in (-1, -0.5, 2)))
    compat.write_powers()
    for exponent in (0, 2, 3, -2):
        expected = tuple(base**exponent for base in (-1, -0.5, 2))
        assert fx.GraphModule(nn.Module(), graph)(exponent) == expected


def test_a_new_node_is_as_one_that_the_graph_creates() -> None:
    ours, theirs = made(True), made(False)
    ours.lint()
    assert str(ours) == str(theirs) and len(ours.nodes) == len(theirs.nodes)
    assert [n.name for n in ours.nodes] == [n.name for n in theirs.nodes]
    found = [g.find_nodes(op="call_function", target=operator.neg) for g in (ours, theirs)]
    assert [n.name for n in found[0]] == [n.name for n in found[1]]
    kinds = [{(type(n.args), type(n.kwargs)) for n in g.nodes} for g in (ours, theirs)]
    assert kinds[0] == kinds[1]
    graph = fx.Graph()
    node = compat.new_node(graph, "call_function", torch.zeros, "x1")
    node.args = (2,)
    assert fx.Graph().node_copy(node).name == "x1"
    graph.erase_node(node)
    assert not len(graph.nodes) and compat.new_node(graph, "placeholder", "x1", "x1").name == "x1_1"


def test_the_python_of_a_module_is_written_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = fx.Graph()
    written: list[int] = []
    write = fx.Graph.python_code

    def noting(self: fx.Graph, *args: Any, **named: Any) -> Any:
        written.append(1)
        return write(self, *args, **named)

    monkeypatch.setattr(fx.Graph, "python_code", noting)
    graph.output(graph.call_function(operator.neg, (graph.placeholder("x"),)))
    module = compat.graph_module(nn.Module(), graph)
    assert isinstance(module, fx.GraphModule) and not written
    assert torch.equal(module(torch.ones(2)), -torch.ones(2)) and written
    assert "neg" in module.code


def test_a_copied_graph_has_nodes_of_its_own_under_the_same_names() -> None:
    graph = made(True)
    next(iter(graph.nodes)).meta["value"] = 1
    copied = compat.copy_graph(graph)
    copied.lint()
    assert str(copied) == str(graph) and len(copied.nodes) == len(graph.nodes)
    assert [n.name for n in copied.nodes] == [n.name for n in graph.nodes]
    assert not set(copied.nodes) & set(graph.nodes)
    first = next(iter(copied.nodes))
    assert first.meta == {"value": 1}
    first.meta["value"] = 2
    assert next(iter(graph.nodes)).meta == {"value": 1}
    with copied.inserting_after(first):
        assert copied.create_node("call_function", operator.neg, (first,), name="x").name == "x_3"
    found = copied.find_nodes(op="call_function", target=operator.neg)
    assert len(found) == 1 + len(NAMES)


def test_arguments_are_set_as_by_an_assignment() -> None:
    graph = made(True)
    first, second, third, *_ = graph.nodes
    compat.set_args(third, (second,))
    compat.set_kwargs(third, {"after": (first,)})
    assert third.args == (second,) and third.kwargs == {"after": (first,)}
    assert third in second.users and third in first.users
    compat.set_kwargs(third, {})
    assert third not in first.users and third.all_input_nodes == [second]
    found = graph.find_nodes(op="call_function", target=operator.neg)
    assert [node.name for node in found] == [n.name for n in graph.nodes if n.op == "call_function"]
    graph.lint()


def test_inputs_are_put_first() -> None:
    """Torch 2.11 writes such graphs."""
    graph = fx.Graph()
    first = graph.placeholder("first")
    total = graph.call_function(operator.add, (first, first))
    late = graph.placeholder("late")
    total.args = (first, late)
    graph.output(total)
    module = fx.GraphModule(nn.Module(), graph)
    compat.put_inputs_first(module)
    compat.put_inputs_first(module)
    assert [node.name for node in module.graph.nodes] == ["first", "late", "add", "output"]
    module.graph.lint()
    assert fx.Interpreter(module).run(1, 2) == 3
