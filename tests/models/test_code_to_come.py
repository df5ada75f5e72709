"""Training goes on while code is compiled: stages run their ATen graphs until it is there.

A script stands in for the process that compiles, and what Inductor gives is the ATen graph.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import compat, megacompile
from megacompile.beside import compile_pool
from megacompile.ir.stages import Code
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.lower import CodeToCome
from megacompile.plan.budget import Budget
from tests import inside


class Pool:
    """A process that compiles when it is told to, and Inductor in this one."""

    def __init__(self, fifo: int) -> None:
        self.fifo = fifo
        self.compiled = 0  # graphs that Inductor has compiled here, or found in its caches
        self.error: Exception | None = None
        self.fails_from = 1  # the first graph that raises it

    def finish(self) -> None:
        """Whatever it is asked for is compiled."""
        os.write(self.fifo, b"ready\n" * 500)

    def compile(self, module: Any, inputs: Any) -> Any:
        self.compiled += 1
        if self.error is not None and self.compiled >= self.fails_from:
            raise self.error
        return lambda *given: module(*(given[0] if len(inputs) != len(given) else given))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Pool]:
    fifo, script = tmp_path / "answers", tmp_path / "python"
    os.mkfifo(fifo)
    reads = "exec 3<&0\ncat <&3 > /dev/null &\n"  # whatever it is asked for
    script.write_text(f"#!/bin/sh\n{reads}echo ready\nexec cat {fifo}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setenv(compile_pool.VARIABLE, "1")
    made = Pool(os.open(fifo, os.O_RDWR))
    monkeypatch.setattr(torch._inductor, "compile", made.compile)
    with torch._inductor.config.patch(compile_threads=2):
        yield made
    compile_pool.stop()
    os.close(made.fifo)


def net() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    return nn.Sequential(layer, nn.Sequential(nn.Linear(8, 8)), nn.LayerNorm(8))


def streamed(model: nn.Module, **options: Any) -> nn.Module:
    return megacompile(model, device="cpu", lowering="inductor", progress=False, **options)


def inputs(rows: int) -> Tensor:
    return torch.linspace(-1, 1, rows * 8).view(rows, 8)


def check(model: nn.Module, rows: int) -> None:
    """It gives the plain model's gradients."""
    plain = net()
    for each in (model, plain):
        each.zero_grad()
        each(inputs(rows)).square().sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-4, rtol=1e-3)


def test_a_later_program_waits_for_no_code(pool: Pool) -> None:
    """The first one does. The next ones run until all of their code is there, and no backward is
    to come; then they run that."""
    model = streamed(net())
    check(model, 4)
    first = pool.compiled
    assert first > 2 and compile_pool._pool is None
    check(model, 6)
    check(model, 7)
    waiting = model(inputs(6)).square().sum()
    assert pool.compiled == first
    pool.finish()
    inside.wait_for_code(model)
    with torch.no_grad():
        model(inputs(7))
    assert pool.compiled == first
    waiting.backward()
    inside.wait_for_code(model)  # of the call without gradients
    check(model, 5)
    second = pool.compiled
    assert second > first
    check(model, 7)
    assert pool.compiled == second


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def test_a_recompute_draws_what_its_forward_drew(pool: Pool) -> None:
    """A gradient comes from where dropout has left an output, before and after code is used."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Scale()), Scale(), Scale()]
    model = streamed(nn.Sequential(*layers), activations="recompute")
    for rows in (4, 6, 7, 7, 6):
        if rows == 7:
            pool.finish()
            inside.wait_for_code(model)
        model.zero_grad()
        y = model(inputs(rows))
        y.sum().backward()
        bias: Any = layers[0][0].bias  # type: ignore[index]
        assert torch.equal(bias.grad, 2 * y.count_nonzero(0))


@pytest.mark.parametrize("why", ["deterministic", "no processes"])
def test_others_wait(why: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each run must give the same numbers, or nobody else compiles."""
    if why == "no processes":
        monkeypatch.setenv(compile_pool.VARIABLE, "0")
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        model = streamed(net())
        check(model, 4)
        first = pool.compiled
        check(model, 6)
    finally:
        torch.use_deterministic_algorithms(False)
    assert pool.compiled > first and compile_pool._pool is None


@pytest.mark.parametrize("happens", ["no kernel", "memory runs out"])
def test_what_happens_to_code_meanwhile(
    happens: str, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be compiled stays as it is, and is not tried again. Where memory runs out, code
    is waited for: operators that are not fused need more."""
    model = streamed(net())
    check(model, 4)
    check(model, 6)
    first = pool.compiled
    pool.finish()
    if happens == "memory runs out":
        assert inside.step_down(model)
        assert pool.compiled > first
        check(model, 6)
    else:
        inside.wait_for_code(model)
        pool.error = RuntimeError(happens)
        with caplog.at_level("WARNING", "megacompile.compile"):
            check(model, 6)
        assert happens in caplog.text
    second = pool.compiled
    check(model, 7)
    assert pool.compiled == second


# --- what belongs together


class Drawn:
    """A template, as far as it matters here."""

    def __init__(self, *, random: bool, code: dict[Any, Any] | None = None) -> None:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        with compat.fake_mode():
            x.meta["val"] = torch.ones(2)
        graph.output((graph.call_function(torch.ops.aten.neg.default, (x,)),))
        self.random = random
        self.code = {} if code is None else code
        self.graphs = dict.fromkeys(Code, torch.fx.GraphModule({}, graph))


def template(**given: Any) -> Any:
    return Drawn(**given)


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
    pool.finish()
    assert to_come.load() and to_come.is_ready()
    to_come.use()
    assert not to_come and not to_come.is_ready()
    assert to_come.without([(new, Code.BACKWARD)], waits=False) == [(new, Code.BACKWARD)]


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_loaded_bit_by_bit(fails: bool, pool: Pool) -> None:
    """All of a template's code is used, or, where some could not be compiled, nothing of it."""
    to_come = CodeToCome(torch.device("cpu"))
    each = template(random=False)
    to_come.without([(each, Code.FORWARD), (each, Code.BACKWARD)], waits=False)
    pool.finish()
    before = dict(each.code)
    pool.error, pool.fails_from = RuntimeError("no kernel") if fails else None, 2
    assert not to_come.load(0.0) and to_come.load()
    assert each.code == before and pool.compiled == 2
    to_come.use()
    assert {each.code[code] is not before[code] for code in before} == {not fails}


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

    strided = template(random=False)
    (neg,) = strided.graphs[Code.FORWARD].graph.find_nodes(
        op="call_function", target=torch.ops.aten.neg.default
    )
    neg.target = torch.ops.aten.as_strided.default
    wanted = [(strided, Code.BACKWARD)]
    assert CodeToCome(torch.device("cpu")).without(wanted, waits=False) == wanted


def test_unfused_operators_must_fit_beside_what_is_planned() -> None:
    budget = Budget(SimpleNamespace(options=SimpleNamespace(gpu_memory=100)))  # type: ignore[arg-type]
    budget._needed_bytes = 80
    assert budget.holds(20, 90) and not budget.holds(21, 90) and not budget.holds(20, 101)
