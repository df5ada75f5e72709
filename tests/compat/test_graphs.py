"""Facts about FX graphs and compile regions that compat relies on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import AttrSource, LocalSource
from torch._guards import Source

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


def test_a_copied_node_is_as_one_that_the_graph_copies() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x1", type_expr=int)
    y = graph.call_function(torch.zeros, ([x, 2],), {"out": x})
    y.meta["value"] = 3
    found = []
    for copies in (compat.copy_node, fx.Graph.node_copy):
        made = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in (x, y, x, y):  # names that are free, and names that are not
            env[node] = copies(made, node, env.__getitem__)
        fields = ("op", "name", "target", "args", "kwargs", "type", "meta", "users")
        found.append([[str(getattr(n, name)) for name in fields] for n in made.nodes])
    assert found[0] == found[1]


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


VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = region(self, x)
        return result


def twice(layer: Layer, x: Tensor) -> Tensor:
    result: Tensor = layer.linear(x).relu()
    return result


def marked() -> Callable[..., Any]:
    return compat.as_region(twice)


region = marked()


def test_a_region_is_a_call_of_a_body() -> None:
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, examples: Any) -> Any:
        del examples
        found.append(module)
        return module.forward

    layers = [Layer() for _ in range(3)]
    torch.compile(nn.Sequential(*layers), backend=backend)(torch.ones(2, 4, requires_grad=True))
    (module,) = found
    calls = module.graph.find_nodes(op="call_function", target=compat.INVOKE)
    assert len(calls) == 3 and all(len(node.args) == 2 + 3 for node in calls)
    assert len({id(compat.body_of(module, node)) for node in calls}) == 1
    ran_in = [[key for key, _ in compat.module_calls(node)] for node in calls]
    assert [keys[-1] for keys in ran_in] == [id(layer) for layer in layers]
    assert compat.REUSES_REGIONS or VERSION < (2, 13), "Dynamo traces every region"


def test_modules_of_a_stack_can_be_others() -> None:
    meta = {"nn_module_stack": {"12@1": ("a", int), "34": ("b", int)}, "val": 1}
    moved = compat.with_module_stack(meta, {12: 56})
    assert moved == {"nn_module_stack": {"56@1": ("a", int), "34": ("b", int)}}
    assert compat.with_module_stack({}, {12: 56}) == {}


def test_hooks_are_seen() -> None:
    linear = nn.Linear(2, 2)
    assert not compat.has_hooks(linear)
    registers: list[Any] = [linear.register_forward_hook, linear.register_forward_pre_hook]
    registers += [linear.register_full_backward_hook, linear.register_full_backward_pre_hook]
    for register in registers:
        handle = register(lambda *args: None)
        assert compat.has_hooks(linear)
        handle.remove()
    assert not compat.has_hooks(linear)
    compat.set_compiled_call(linear, print)
    assert compat.has_hooks(linear)


def test_fake_tensors_that_remember_their_data() -> None:
    with compat.fake_mode(), compat.functional_mode():
        assert compat.has_known_data(torch.tensor(3))
        assert not compat.has_known_data(torch.ones(3))
        assert not compat.has_known_data(compat.to_functional(torch.ones(3)))


def test_a_source_that_is_renamed_once_is_the_same_as_before() -> None:
    root, other = LocalSource("layers"), LocalSource("others")
    shared = AttrSource(root, "norm")
    sources = [AttrSource(shared, "eps"), AttrSource(shared, "weight"), shared]

    def rename(source: Source) -> Source:
        return other if source == root else source

    if VERSION == (2, 11):
        with compat.sources_renamed_once():
            assert not hasattr(Source, "clone")
        return
    plain = [source.clone(rename) for source in sources]
    with compat.sources_renamed_once():
        found = [source.clone(rename) for source in sources]
        assert vars(found[0])["base"] is vars(found[1])["base"]
        assert [source.clone() for source in sources] == sources
    assert found == plain and found[0].name == "L['others'].norm.eps"
    assert sources[0].clone(rename) is not sources[0].clone(rename)
