"""Symbols of our own, and facts about FX graphs and compile regions that compat relies on."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megacompile import compat
from tests.draws import drawn

ROWS = sympy.Symbol("n0", integer=True, positive=True)


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


def test_powers_of_negative_numbers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(operator.pow, (base, x)) for base in (-1, -0.5, 2)))
    compat.write_powers()
    for exponent in (0, 2, 3, -2):
        expected = tuple(base**exponent for base in (-1, -0.5, 2))
        assert fx.GraphModule(nn.Module(), graph)(exponent) == expected


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
