"""Symbols of our own, and facts about FX graphs and compile regions that compat relies on."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile import compat
from tests.draws import drawn

ROWS = sympy.Symbol("n0", integer=True, positive=True)


def test_what_dynamo_says_of_a_graph() -> None:
    found: list[Any] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        found.append(compat.described_inputs(module))
        return module.forward

    def double(x: Tensor, scale: float) -> Tensor:
        return x * scale

    step = torch.compile(double, backend=backend)
    for rows, scale in ((4, 1.0), (6, 0.5)):
        step(torch.zeros(rows, 2), scale)
    assert found[0] is None
    symbols = [item.number for item in found[-1]]
    assert {str(symbol) for symbol in symbols if symbol is not None} == {"n0", "n1"}
    assert compat.DescribedInput(shape=(ROWS, 2), stride=(2, 1)) in found[-1]
    assert sum(item.in_tensor for item in found[-1]) == 1
    x = torch.zeros(4, 2)
    torch._dynamo.mark_dynamic(x, 0)
    copy: Any = compat.keep_dynamic_marks(x, x.double())
    assert copy._dynamo_dynamic_indices == {0}


def test_tracing_with_symbols() -> None:
    """Operations with them are not remembered."""
    assert compat.symbols_now() is None
    fakes, remembered = compat.SymbolicFakes({ROWS: 12}), FakeTensorMode.cache_info()
    with fakes, compat.real_strides():
        assert compat.symbols_now() is fakes
        n = fakes.number(ROWS)
        x = torch.empty(n, 4).t() @ torch.empty(n, 4)
        long = torch.nn.functional.pad(torch.empty(4, n), (0, 1))
    assert x.shape == (4, 4) and FakeTensorMode.cache_info() == remembered
    assert compat.is_number(n)
    assert compat.fakes_of(n) is fakes
    assert compat.expression_of(long.shape[1]) == (13, ROWS + 1)
    assert fakes.holds(40)
    assert bool(n < 20)
    assert not fakes.holds(40)
    assert not issubclass(compat.UntraceableSymbols, RuntimeError)


def test_expressions() -> None:
    """Ints by way of a float are computed, too."""
    assert compat.evaluated(2 * ROWS + 1, {ROWS: 3}) == 7
    assert compat.as_function(((ROWS + 1, 5), (ROWS,)), [ROWS])(4) == ((5, 5), (4,))
    fakes = compat.SymbolicFakes({ROWS: 9})
    _, tenths = compat.expression_of(torch.sym_int(fakes.number(ROWS) * 0.3))
    for expression, rows, wanted in ((2 * ROWS, 21, 42), (tenths, 20, 6)):
        assert compat.evaluated(expression, {ROWS: rows}) == wanted
        graph = fx.Graph()
        graph.output(compat.reified(graph, expression, {ROWS: graph.placeholder("n")}))
        assert fx.GraphModule({}, graph)(rows) == wanted
    table, x = compat.symbolic_decompositions(), torch.zeros(3, 2)
    assert table[torch.ops.aten.slice.Tensor](x, 0, 0, 3) is x, "all of it is no operator"
    other = sympy.Symbol("n1", integer=True, positive=True)
    fakes = compat.SymbolicFakes({ROWS: 12, other: 12})
    with fakes:  # what is stated of a size is known
        compat.check(fakes.number(ROWS) == fakes.number(other))
    assert fakes.holds(7, 7) and not fakes.holds(7, 8)
    with pytest.raises(RuntimeError):
        compat.check(False)


def test_a_scaled_image_keeps_its_symbols() -> None:
    """Each operator that scales gives what its C++ gives for numbers."""
    fakes = compat.SymbolicFakes({ROWS: 9})
    aten = torch.ops.aten
    names = [n for n in dir(aten) if "upsample" in n and "vec" in getattr(aten, n).overloads()]
    assert len(names) >= 12
    for name in names:
        operator = getattr(aten, name).vec
        dims = next(int(c) for c in name if c in "123")
        corners = [False] if "align_corners" in str(operator._schema) else []
        scales = [1.5] * dims
        want = operator(torch.zeros(1, 1, *[9] * dims), None, *corners, scales).shape
        with fakes:
            x = torch.zeros((1, 1, *[fakes.number(ROWS)] * dims))
            got = operator(x, None, *corners, scales)
        assert [compat.expression_of(n)[0] for n in got.shape] == list(want), name
        assert compat.expression_of(got.shape[2])[1].free_symbols == {ROWS}, name
    assert fakes.holds(20)


MATRICES = [(3,), (4, 3), (5, 1, 4, 3)]
OTHERS = [(3,), (3, 6), (1, 2, 3, 6)]


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "trained", drawn([(True, True)], [(False, False), (True, False), (False, True)])
)
def test_a_product_of_matrices_is_taken_apart_as_in_cpp(
    trained: tuple[bool, bool], autocast: bool
) -> None:
    """Node by node, forward and backward, whatever the numbers of dimensions."""

    def product(tensors: Sequence[Any], _: Sequence[Any]) -> list[Any]:
        with compat.functional_mode():
            a, b = map(compat.to_functional, tensors)
            turned = a.transpose(0, 1).contiguous().transpose(0, 1) if a.dim() > 2 else a
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = [torch.matmul(a, b), torch.matmul(turned, b)]
            sources = [x for x in (a, b) if x.requires_grad]
            grads = torch.autograd.grad([x.sum() for x in found], sources) if sources else ()
            return list(map(compat.from_functional, (*found, *grads)))

    def traced(fakes: Any, shapes: Sequence[Any]) -> str:
        with fakes:
            given = [
                torch.zeros(shape, requires_grad=wanted)
                for shape, wanted in zip(shapes, trained, strict=True)
            ]
            graph = compat.trace(product, given, [], compat.eager_decompositions())
        graph.graph.eliminate_dead_code()
        return str(graph.code)

    for a, b in itertools.product(MATRICES, OTHERS):
        want = traced(compat.fake_mode(), (a, b))
        symbolic = compat.SymbolicFakes({})
        assert traced(symbolic, (a, b)) == want, (a, b)


def test_a_product_of_matrices_keeps_its_symbols() -> None:
    fakes = compat.SymbolicFakes({ROWS: 9})
    with fakes:
        n = fakes.number(ROWS)
        got = torch.matmul(torch.zeros(2, 4, n, 3), torch.zeros(2, 4, 3, n))
        torch.nn.functional.linear(torch.zeros(2, n, 3), torch.zeros(5, 3, requires_grad=True))
        torch.matmul(torch.zeros(2, 3, 1), torch.zeros(2, 1, n))
    assert compat.expression_of(got.shape[3])[1] == ROWS
    assert fakes.holds(20)


def test_without_our_mode_cpp_scales() -> None:
    """torch.export turns on the key of our kernels, too."""
    x = torch.arange(6.0).view(1, 1, 2, 3)
    want = torch.nn.functional.interpolate(x, scale_factor=1.5)
    with torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.PreDispatch):
        got = torch.nn.functional.interpolate(x, scale_factor=1.5)
    assert torch.equal(got, want)


def test_who_relies_on_a_relation_or_a_size_is_noted() -> None:
    fakes = compat.SymbolicFakes({ROWS: 12})
    assert compat.fakes_in([3, torch.zeros(2)]) is None
    with fakes:
        assert compat.fakes_in([3, torch.zeros(2)]) is fakes
        assert fakes.number(ROWS) % 4 == 0
        fakes.note_fixed(lambda: "the first")
        assert fakes.number(ROWS) < 100
        fakes.note_fixed(lambda: "the second")
    assert fakes.broken([16]) == ""
    assert fakes.broken([18]).startswith("the first relies on ") and "n0" in fakes.broken([18])
    assert fakes.broken([200]).startswith("the second relies on ")
    fakes = compat.SymbolicFakes({ROWS: 12})
    half = fakes.number(ROWS) // 2
    fakes.note_fixed(lambda: "nobody")
    assert int(half) == 6
    fakes.note_fixed(lambda: "the first")
    assert fakes.number(ROWS) == 12
    fakes.note_fixed(lambda: "the second")
    assert fakes.fixed == {ROWS: "the first"} and not fakes.has_floats


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
