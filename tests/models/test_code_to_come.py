"""Training goes on while code is compiled: stages run their ATen graphs until it is there.

A script stands in for the process that compiles, and what Inductor gives is the ATen graph.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules
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
    monkeypatch.setenv("MEGACOMPILE_COMPILE_PROCESSES", "1")
    made = Pool(os.open(fifo, os.O_RDWR))
    monkeypatch.setattr(torch._inductor, "compile", made.compile)
    with torch._inductor.config.patch(compile_threads=2):
        yield made
    inside.stop_processes()
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


def settle(model: nn.Module, pool: Pool, rows: int) -> None:
    """Calls load code for a moment each: until there is no more."""
    seen = -1
    while pool.compiled > seen:
        seen = pool.compiled
        check(model, rows)


def test_a_later_program_waits_for_no_code(pool: Pool) -> None:
    """The first one does. The next ones run until all of their code is there, and no backward is
    to come; then they run that."""
    model = streamed(net())
    check(model, 4)
    first = pool.compiled
    assert first > 2
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
    settle(model, pool, 5)
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


class Drawing(nn.Module):
    """A layer that drops out, and as many others as it is told to run."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Scale())
        self.layers = nn.ModuleList([first, Scale(), Scale()])

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x


def test_a_recompute_draws_what_its_forward_drew(pool: Pool) -> None:
    """A gradient comes from where dropout has left an output, before and after code is used. Code
    that draws runs in one way: where some of it is compiled, more of it is, at once."""
    torch.manual_seed(0)
    model: Any = streamed(Drawing(), activations="recompute")
    model(inputs(4), 1).sum().backward()  # which is not run again
    first = pool.compiled
    for rows in (4, 6, 7, 7, 6):
        if rows == 7:
            pool.finish()
            inside.wait_for_code(model)
        model.zero_grad()
        y = model(inputs(rows))
        y.sum().backward()
        assert torch.equal(model.layers[0][0].bias.grad, 2 * y.count_nonzero(0))
        assert pool.compiled > first


class Strided(nn.Sequential):
    """It reads its last value by addresses."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return y.as_strided(x.shape, x.stride())


@pytest.mark.parametrize("why", ["deterministic", "no processes", "strides"])
def test_others_wait(why: str, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each run must give the same numbers, where nobody else compiles, and what needs the
    strides that were traced, which kernels may not give."""
    if why == "no processes":
        monkeypatch.setenv("MEGACOMPILE_COMPILE_PROCESSES", "0")
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        model = streamed(Strided(*net().children()) if why == "strides" else net())
        check(model, 4)
        first = pool.compiled
        check(model, 6)
    finally:
        torch.use_deterministic_algorithms(False)
    assert pool.compiled > first


def codes(model: nn.Module) -> list[dict[Any, Any]]:
    return [dict(template.code) for template in schedules(model)[-1].templates]


@pytest.mark.parametrize("happens", ["no second kernel", "memory runs out"])
def test_what_happens_to_code_meanwhile(
    happens: str, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be compiled stays as it is, with all of its template, and is not tried again.
    Where memory runs out, code is waited for: operators that are not fused need more."""
    model = streamed(net())
    check(model, 4)
    check(model, 6)
    first, before = pool.compiled, codes(model)
    pool.finish()
    if happens == "memory runs out":
        assert inside.step_down(model)
        assert pool.compiled > first
        check(model, 6)
    else:
        inside.wait_for_code(model)
        pool.error, pool.fails_from = RuntimeError(happens), first + 2
        with caplog.at_level("WARNING", "megacompile.compile"):
            settle(model, pool, 6)
        assert happens in caplog.text
    second = pool.compiled
    check(model, 7)
    assert pool.compiled == second
    assert (codes(model) == before) == (happens != "memory runs out")
