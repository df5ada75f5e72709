"""Training goes on while code is compiled: stages run their ATen graphs until it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import megacompile
from megacompile.beside import compile_pool
from megacompile.ir.stages import Code
from megacompile.passes.stages import lower
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.lower import CodeToCome
from megacompile.plan.budget import Budget
from tests import inside


class Pool:
    """Processes that compile when they are told to, and Inductor as it is here: what it gives is
    the ATen graph."""

    def __init__(self) -> None:
        self.asked = 0  # graphs that it was given
        self.compiled = 0  # graphs that Inductor has compiled, or found in its caches
        self.is_done = False
        self.error: Exception | None = None

    def submit(self, graphs: Callable[[], Iterator[Any]], device: torch.device) -> Pool:
        del device
        self.asked += len(list(graphs()))
        return self

    def done(self) -> bool:
        return self.is_done

    def take(self, part: object) -> None:
        del part

    def code(self, module: Any) -> Any:
        self.compiled += 1
        if self.error is not None:
            raise self.error
        return direct(module)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    pool = Pool()
    monkeypatch.setattr(compile_pool, "submit", pool.submit)
    monkeypatch.setattr(lower, "compiled", pool.code)
    return pool


def net() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    return nn.Sequential(layer, nn.Sequential(nn.Linear(8, 8)), nn.LayerNorm(8))


def streamed(model: nn.Module, **options: Any) -> nn.Module:
    return megacompile(model, device="cpu", lowering="inductor", progress=False, **options)


def inputs(rows: int) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 8).view(rows, 8)


def gradients(model: nn.Module, rows: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(inputs(rows)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def check(model: nn.Module, rows: int) -> None:
    """It gives the plain model's gradients."""
    for found, expected in zip(gradients(model, rows), gradients(net(), rows), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_a_later_program_waits_for_no_code(pool: Pool) -> None:
    """The first one does. The next ones run until all of their code is there, then run that."""
    model = streamed(net())
    check(model, 4)
    first = pool.compiled
    assert first > 2 and pool.asked == 0
    check(model, 6)
    check(model, 7)
    assert pool.compiled == first and pool.asked > 2
    pool.is_done = True
    check(model, 5)
    assert pool.compiled == first + pool.asked
    check(model, 7)
    assert pool.compiled == first + pool.asked


def test_code_is_not_used_while_a_backward_is_to_come(pool: Pool) -> None:
    model = streamed(net())
    check(model, 4)
    check(model, 6)
    first = pool.compiled
    waiting = model(inputs(6)).square().sum()
    pool.is_done = True
    with torch.no_grad():
        model(inputs(7))
    assert pool.compiled == first
    waiting.backward()
    check(model, 6)
    assert pool.compiled > first


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def test_a_recompute_draws_what_its_forward_drew(pool: Pool) -> None:
    """A gradient comes from where dropout has left an output, before and after code is used."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Scale()), Scale(), Scale()]
    model = streamed(nn.Sequential(*layers), activations="recompute")
    for rows, pool.is_done in ((4, False), (6, False), (7, False), (7, True), (6, True)):
        model.zero_grad()
        y = model(inputs(rows))
        y.sum().backward()
        bias: Any = layers[0][0].bias  # type: ignore[index]
        assert torch.equal(bias.grad, 2 * y.count_nonzero(0))


@pytest.mark.parametrize("why", ["deterministic", "eager"])
def test_others_wait(why: str, pool: Pool) -> None:
    """Where each run must give the same numbers, or there is nothing to compile."""
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        model = streamed(net()) if why == "deterministic" else megacompile(net(), device="cpu")
        for rows in (4, 6, 7):
            check(model, rows)
    finally:
        torch.use_deterministic_algorithms(False)
    assert pool.asked == 0


def test_without_processes_everybody_waits(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "submit", lambda graphs, device: None)
    model = streamed(net())
    check(model, 4)
    first = pool.compiled
    check(model, 6)
    assert pool.compiled > first


def test_what_cannot_be_compiled_stays_as_it_is(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    model = streamed(net())
    check(model, 4)
    check(model, 6)
    pool.is_done, pool.error = True, RuntimeError("no kernel")
    with caplog.at_level("WARNING", "megacompile.compile"):
        check(model, 6)
    assert "a stage stays uncompiled: no kernel" in caplog.text
    compiled = pool.compiled
    check(model, 7)
    assert pool.compiled == compiled, "nor is it tried again"


def test_where_memory_runs_out_code_is_waited_for(pool: Pool) -> None:
    model = streamed(net())
    check(model, 4)
    first = pool.compiled
    check(model, 6)
    compiler = inside.streamed(model).buckets.plans.compiler
    assert compiler.step_down() == "stages run compiled code"
    assert pool.compiled == first + pool.asked
    check(model, 6)
    check(model, 7)


class Drawn:
    """A template, as far as it matters here."""

    def __init__(self, *, random: bool, code: dict[Any, Any] | None = None) -> None:
        graph = torch.fx.Graph()
        graph.output((graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),)),))
        self.random = random
        self.code = {} if code is None else code
        self.graphs = dict.fromkeys(Code, torch.fx.GraphModule({}, graph))


def template(**kwargs: Any) -> Any:
    return Drawn(**kwargs)


def test_code_that_draws_runs_in_one_way(pool: Pool) -> None:
    """Compiled if some of it is, and not compiled if some of it is not."""
    drawing, other = (
        template(random=random, code={Code.FORWARD: "compiled"}) for random in (True, False)
    )
    to_come = CodeToCome(torch.device("cpu"))
    wanted = [(drawing, Code.RECOMPUTE), (other, Code.RECOMPUTE)]
    assert to_come.without(wanted, waits=False) == wanted[:1]
    assert Code.RECOMPUTE in other.code

    new = template(random=True)
    assert to_come.without([(new, Code.FORWARD)], waits=False) == []
    assert to_come.without([(new, Code.RECOMPUTE)], waits=True) == []
    pool.is_done = True
    assert to_come.is_ready() and to_come.load()
    to_come.use()
    assert not to_come and not to_come.is_ready()
    assert to_come.without([(new, Code.BACKWARD)], waits=False) == [(new, Code.BACKWARD)]


def test_it_is_loaded_bit_by_bit(pool: Pool) -> None:
    to_come = CodeToCome(torch.device("cpu"))
    each = template(random=False)
    to_come.without([(each, Code.FORWARD), (each, Code.BACKWARD)], waits=False)
    before = dict(each.code)
    assert not to_come.load(0.0) and to_come.load()
    assert each.code == before
    to_come.use()
    assert each.code.keys() == before.keys()
    assert all(each.code[code] is not before[code] for code in before)


def test_unfused_operators_must_fit_beside_what_is_planned() -> None:
    budget = Budget(SimpleNamespace(options=SimpleNamespace(gpu_memory=100)))  # type: ignore
    budget._needed_bytes = 80
    assert budget.holds(20, 90) and not budget.holds(21, 90) and not budget.holds(20, 101)


def test_what_needs_the_strides_that_were_traced_waits(pool: Pool) -> None:
    """Kernels may give others: a view of them is a copy, and `as_strided` would read elsewhere."""
    x = torch.ones(2, 3)
    graph = torch.fx.Graph()
    view = graph.call_function(torch.ops.aten.view.default, (graph.placeholder("x"), [6]))
    graph.output((view,))
    module = torch.fx.GraphModule({}, graph)
    with pytest.raises(RuntimeError, match="view size"):
        direct(module)(x.t().contiguous().t())
    (found,) = direct(module, any_strides=True)(x.t().contiguous().t())
    assert found is not None and torch.equal(found, x.view(6))

    to_come = CodeToCome(torch.device("cpu"))
    strided = template(random=False)
    for node in strided.graphs[Code.FORWARD].graph.find_nodes(
        op="call_function", target=torch.ops.aten.neg.default
    ):
        node.target = torch.ops.aten.as_strided.default
    assert to_come.without([(strided, Code.BACKWARD)], waits=False) == [(strided, Code.BACKWARD)]
