"""What compat takes for granted of tracing and Inductor, of symbols, and of FX graphs."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch._inductor import cpu_vec_isa
from torch._inductor.sizevars import SizeVarAllocator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import Mod

from megacompile import compat
from megacompile.passes.stages.numbers import first_difference
from tests.draws import drawn

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")


@pytest.mark.parametrize(("width", "wanted"), [(128, True), (0, False)])
def test_images_that_inductor_lays_out_with_their_channels_last(width: int, wanted: bool) -> None:
    """It does on a CPU too, and follows pools, whose operators it has."""

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        x = primals[0]
        if width:
            x = torch.conv2d(x, primals[1])
        for pool in (torch.nn.functional.max_pool2d, torch.nn.functional.avg_pool2d):
            x = pool(x, 2)
        return [x]

    given = [torch.zeros(2, 3, 8, 8), torch.zeros(max(1, width), 3, 1, 1)]
    table = compat.inductor_decompositions()
    with compat.fake_mode() as mode:
        made = compat.trace(joint, [mode.from_tensor(g) for g in given], [], table)
    assert compat.prefers_channels_last(made) is wanted
    called = {node.target for node in made.graph.nodes if node.op == "call_function"}
    pools = {target for target in called if "pool" in str(target)}
    assert pools and pools <= set(compat.POOLS)


def test_code_for_symbols_is_not_for_multiples_of_eight_alone() -> None:
    """Inductor asks that of the mask of an attention, and whether kernels are faster in one."""
    symbol = sympy.Symbol("megacompile_s", integer=True, positive=True)
    fakes = compat.SymbolicFakes({symbol: 64})
    size = fakes.number(symbol)
    sizes = SizeVarAllocator(fakes.env)
    divides = sympy.Eq(Mod(size.node.expr, 8), 0)
    with compat.inductor._for_all_sizes([size]):
        assert not sizes.guard_or_false(divides) and not fakes.env.guards
        assert sizes.guard_or_false(sympy.Eq(Mod(sympy.Integer(64), 8), 0))
        assert torch._inductor.config.triton.mix_order_reduction_non_strict_mode
    with compat.inductor._for_all_sizes([64]):
        assert sizes.guard_or_false(divides) and fakes.env.guards, "else the test shows nothing"
        assert not torch._inductor.config.triton.mix_order_reduction_non_strict_mode


@needs_compiler
def test_what_reads_random_numbers_runs_behind_their_draw() -> None:
    """In torch 2.11 Inductor fuses the product with the softmax, before `bernoulli_`."""

    def dropped(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        weights = torch.softmax(x @ x.transpose(1, 2) + bias, -1)
        mask = torch.bernoulli(torch.empty_like(weights), 0.9)
        return weights * (mask / 0.9), mask, weights

    x, bias = torch.rand(16, 21, 8), torch.rand(21, 1)
    with compat.fake_mode() as mode:
        fakes = [mode.from_tensor(x), mode.from_tensor(bias)]
    table = compat.inductor_decompositions()
    module = make_fx(dropped, decomposition_table=table, tracing_mode="fake")(x, bias)
    code = compat.compile_inductor(module, fakes)
    torch.manual_seed(0)
    found = code(x, bias)
    torch.manual_seed(0)
    torch.testing.assert_close(tuple(found), dropped(x, bias))


@needs_compiler
def test_other_backends_still_use_aot_autograd() -> None:
    x = torch.rand(4)
    with compat.fake_mode() as mode:
        fakes = [mode.from_tensor(x)]
    module = make_fx(lambda x: (x.sin(),), tracing_mode="fake")(x)
    torch.testing.assert_close(compat.compile_inductor(module, fakes)(x)[0], x.sin())
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda graph, _: graph)
    assert torch.equal(torch.compile(torch.sin, backend=backend)(x), x.sin())


@needs_compiler
def test_the_backward_of_attention_gets_the_bias_as_it_was_traced() -> None:
    """On CUDA its kernel refuses rows that begin at other elements than multiples of 4."""
    operator = aten._scaled_dot_product_efficient_attention_backward.default
    strides: list[tuple[int, ...]] = []

    def kernel(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *_: Any) -> Any:
        strides.append(bias.stride())
        return q.clone(), k.clone(), v.clone(), bias.new_empty(0)

    def traced(mask: Tensor, q: Tensor, sums: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        n = mask.shape[-1]
        bias = aten.slice.Tensor(aten.constant_pad_nd.default(mask, [0, 8 - n % 8]), -1, 0, n)
        bias = bias.expand(q.shape[0], q.shape[1], n, n)
        given = (q, q, q, q, bias, q, sums, seed, seed, 0.0, [True, True, True, False])
        return tuple(operator(*given)[:3])

    def inputs(n: int) -> tuple[Tensor, ...]:
        q = torch.rand(2, n, 3, 8).transpose(1, 2)
        return torch.rand(2, 1, n, n), q, torch.rand(2, 3, 64), torch.tensor(0)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_efficient_attention_backward", kernel, "CPU")
        table = compat.inductor_decompositions()
        module = make_fx(traced, decomposition_table=table, tracing_mode="symbolic")(*inputs(45))
        fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        with torch._inductor.config.patch(force_disable_caches=True):
            code = compat.compile_inductor(module, fakes)
        code(*inputs(45))
        code(*inputs(33))
    assert strides == [(45 * 48, 0, 48, 1), (33 * 40, 0, 40, 1)]


@needs_compiler
def test_a_graph_of_sizes_alone() -> None:
    """Such as the positions of a text, after a graph break."""
    n = sympy.Symbol("n", integer=True, positive=True)
    with compat.SymbolicFakes({n: 7}) as fakes:
        size = fakes.number(n)
    table = compat.inductor_decompositions()
    positions = make_fx(lambda n: (torch.arange(n)[None],), table, tracing_mode="symbolic")
    module = positions(size)
    with torch._inductor.config.patch(force_disable_caches=True):
        code = compat.compile_inductor(module, [size])
    for length in (7, 12):
        torch.testing.assert_close(code(length)[0], torch.arange(length)[None])


@pytest.mark.parametrize("case", ["functional", "changes a value"])
def test_functional_graphs_are_not_traced_again(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are: AOTAutograd names their nodes. Inductor gets values of the mode of its inputs."""
    given: list[tuple[fx.GraphModule, Any]] = []

    def inner(module: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        given.append((module, inputs))
        return lambda inputs: [len(inputs)]

    compile_fx = functools.partial(torch._inductor.compile_fx.compile_fx, inner_compile=inner)
    monkeypatch.setattr(torch._inductor, "compile", compile_fx)
    add = aten.add_.Tensor if case == "changes a value" else aten.add.Tensor
    module = fx.symbolic_trace(lambda x: (add(aten.sin.default(x), 1),))
    (sine,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
    sine.name = "ours"
    with compat.fake_mode():
        fake: Any = torch.ones(8)
    code = compat.compile_inductor(module, [fake])
    ((handed, inputs),) = given
    (sine,) = handed.graph.find_nodes(op="call_function", target=aten.sin.default)
    assert (sine.name == "ours") == (case == "functional")
    assert not handed.graph.find_nodes(op="call_function", target=aten.add_.Tensor)
    if case == "functional":
        assert code(torch.ones(8)) == [1]
        assert handed is not module and not any("val" in node.meta for node in module.graph.nodes)
        (mode,) = {each.fake_mode for each in (sine.meta["val"], *inputs, fake)}
        assert isinstance(mode, FakeTensorMode)


@needs_compiler
def test_vector_instructions_are_tried_in_one_process_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that another process has named are taken over; any other one is tried."""
    names, found = compat.vector_isas(), list[tuple[str, bool]]()
    compat.use_vector_isas([])
    assert compat.vector_isas() == names, "what is known stays so"
    assert "self.check_build(" in inspect.getsource(cpu_vec_isa.VecISA)

    def listed() -> list[Any]:
        for isa in cpu_vec_isa.supported_vec_isa_list:
            found.append((str(isa), isa.check_build("code")))
        return []

    tried = functools.partialmethod(lambda isa, code: False)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", tried)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", listed)
    every = list(map(str, cpu_vec_isa.supported_vec_isa_list))
    compat.use_vector_isas(every[1:])
    assert found == [(name, name in every[1:]) for name in every]
    assert vars(cpu_vec_isa.VecISA)["check_build"] is tried


ROWS = sympy.Symbol("n0", integer=True, positive=True)


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


MATRICES = [(3,), (4, 3), (1, 4, 3), (5, 4, 3), (5, 1, 4, 3)]
OTHERS = [(3,), (3, 6), (1, 3, 6), (5, 3, 6), (1, 5, 3, 6)]


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
            gaps = torch.cat((a, a), -1)[..., :3]
            columns = b.mT.contiguous().mT if b.dim() > 1 else b
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = [torch.matmul(x, b) for x in (a, turned, gaps)]
                found += [torch.matmul(a, columns)]
                found += [torch.matmul(a, b).div_(2)] if min(a.dim(), b.dim()) > 1 else []
            sources = [x for x in (a, b) if x.requires_grad]
            grads = torch.autograd.grad([x.sum() for x in found], sources) if sources else ()
            return list(map(compat.from_functional, (*found, *grads)))

    def traced(fakes: Any, shapes: Sequence[Any]) -> fx.GraphModule:
        with fakes:
            given = [
                torch.zeros(shape, requires_grad=wanted)
                for shape, wanted in zip(shapes, trained, strict=True)
            ]
            graph = compat.trace(product, given, [], compat.eager_decompositions())
        graph.graph.eliminate_dead_code()
        return graph

    for a, b in itertools.product(MATRICES, OTHERS):
        want = traced(compat.fake_mode(), (a, b))
        symbolic = compat.SymbolicFakes({})
        assert not first_difference(traced(symbolic, (a, b)), want), (a, b)


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
