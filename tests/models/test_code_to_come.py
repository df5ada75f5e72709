"""Training goes on while code is compiled: stages run their ATen graphs until it is there.

A script stands in for the process that compiles, and what Inductor gives is the ATen graph. Below
are real processes: an update that they compile is taken over between two steps, stages are found
with Inductor as it is, and what one run has compiled another one finds.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from megacompile import explain, megacompile, schedules
from tests import inside
from tests.equality.nets import Applies
from tests.interrupts import profiled
from tests.processes import python
from tests.sources import ROOT
from tests.zoo import equal, uncompiled


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
    answers = f"[ -p /dev/stdout ] && exec cat {fifo}\nwait\n"  # not the one for updates
    script.write_text(f"#!/bin/sh\n{reads}echo ready\n{answers}")
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


def drawing() -> Any:
    """A layer that drops out, and as many others as it is told to run."""

    def forward(m: Any, x: Tensor, depth: int = 3) -> Tensor:
        for layer in m.layers[:depth]:
            x = layer(x)
        return x

    def scale() -> Any:
        return Applies(lambda m, x: m.weight * x, weight=nn.Parameter(torch.ones(8)))

    first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), scale())
    return Applies(forward, layers=nn.ModuleList([first, scale(), scale()]))


def test_a_recompute_draws_what_its_forward_drew(pool: Pool) -> None:
    """A gradient comes from where dropout has left an output, before and after code is used. Code
    that draws runs in one way: where some of it is compiled, more of it is, at once."""
    torch.manual_seed(0)
    model: Any = streamed(drawing(), activations="recompute")
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


def interrupts(name: str) -> Callable[[FrameType, str, Any], None]:
    """Ctrl-C in the second call of a function."""
    calls = itertools.count(1)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == name and next(calls) == 2:
            raise KeyboardInterrupt

    return profile


@pytest.mark.parametrize("when", ["uncompiled", "_compiled"])
def test_ctrl_c_while_code_is_asked_for_or_loaded(when: str, pool: Pool) -> None:
    """The next call goes on with what was interrupted: no code stays as it is."""
    model = streamed(net())
    check(model, 4)
    if when == "uncompiled":
        with pytest.raises(KeyboardInterrupt), profiled(interrupts(when)):
            check(model, 6)
    check(model, 6)
    before = codes(model)
    pool.finish()
    inside.wait_for_code(model)
    if when == "_compiled":
        with pytest.raises(KeyboardInterrupt), profiled(interrupts(when)):
            check(model, 6)
    settle(model, pool, 6)
    for now, then in zip(codes(model), before, strict=True):
        assert all(now[code] is not then[code] for code in then)


needs_compiler = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="needs a C++ compiler")


class Run:
    """A model that trains with AdamW; its stages run as they are, compiled by nobody."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.dtype, self.others = dtype, set(psutil.Process().children())
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        megacompile(self.model, device="cpu", lowering="inductor", progress=False)
        with torch.no_grad():
            self.model(torch.zeros(4, 8, dtype=dtype))

    def train(self, steps: int) -> set[str]:
        """How the host has made the updates."""
        for k in range(steps):
            x = torch.linspace(-1, k + 1, 32).view(4, 8)
            self.model(x.to(self.dtype)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return inside.backends(self.model)

    def code(self) -> tuple[int, int]:
        """The updates found, and compiled here."""
        counts = explain(self.model, changes=False).code.get("updates in C++")
        return (counts.found, counts.made) if counts else (0, 0)

    def wait(self) -> None:
        """Until the processes that have begun since are over."""
        for process in set(psutil.Process().children()) - self.others:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    def values(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Inductor's caches are empty, and no process is left behind."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    inside.stop_processes()


@pytest.fixture
def stages_as_they_are(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setattr(torch._inductor, "compile", uncompiled)
    with torch._inductor.config.patch(compile_threads=1):
        yield


ANOTHER_RUN = """
import torch
from tests.models.test_code_to_come import Run, uncompiled
torch._inductor.compile = uncompiled
run = Run(torch.float64)
print(*run.train(2) | run.train(2), *run.code(), sep=", ")
torch.save(run.values(), "values")
"""


@needs_compiler
@pytest.mark.usefixtures("stages_as_they_are")
def test_an_update_is_compiled_elsewhere_and_found_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing compiles here meanwhile, and nothing is compiled again, though Inductor's settings
    have changed, nor in another run. The run that switches has the bits of those that do not."""
    gate, waits = tmp_path / "gate", tmp_path / "python"
    waits.write_text(
        f'#!/bin/sh\nwhile [ ! -e {gate} ]; do sleep 0.05; done\nexec {sys.executable} "$@"\n'
    )
    waits.chmod(0o755)
    switches = Run(torch.float64)  # no other test of this process has such states
    found, made = switches.code()
    with monkeypatch.context() as slow:
        slow.setattr(sys, "executable", str(waits))
        assert switches.train(2) == {"torch"}
    assert switches.code() == (found, made)
    gate.touch()
    switches.wait()
    changed = torch._inductor.config.patch({"triton.unique_kernel_names": False})
    with monkeypatch.context() as on_a_gpu, changed:
        on_a_gpu.setattr("torch._inductor.compile_fx.has_triton", lambda: True)
        assert switches.train(2) == {"compiled to C++"}
    assert switches.code() == (found + 1, made)
    assert explain(switches.model, changes=False).code["updates in C++"].time_s > 0
    torch.compiler.reset()
    steady = Run(torch.float64)
    assert (steady.train(2), steady.code()) == ({"compiled to C++"}, (found + 1, made))
    steady.train(2)
    assert Run(torch.float16).train(1) == {"torch"}, "each kind is asked for"
    another = python("-c", ANOTHER_RUN, folder=tmp_path)
    assert another.stdout == "compiled to C++, 1, 0\n", another.stderr
    values = zip(switches.values(), steady.values(), torch.load(tmp_path / "values"), strict=True)
    assert all(equal(a, b) and equal(a, c) for a, b, c in values)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.usefixtures("stages_as_they_are")
def test_a_compiler_that_fails_refuses(tmp_path: Path) -> None:
    """And the process says so."""
    fails = tmp_path / "c++"
    fails.write_text('#!/bin/sh\ntest "$1" = --version\n')
    fails.chmod(0o755)
    with torch._inductor.config.patch({"cpp.cxx": (str(fails),)}):
        run = Run(torch.float32)
        assert run.train(1) == {"torch"}
        run.wait()
        with pytest.warns(UserWarning, match="compiled"):
            assert run.train(1) == {"torch"}


def streamed_layers() -> nn.Module:
    torch.manual_seed(0)
    return streamed(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def trained(model: nn.Module) -> float:
    """Behind three sizes, one captured with a symbol; the gradients of the first, added."""
    sums = []
    for rows in (4, 6, 7):
        model(torch.linspace(-1, 1, rows * 8).view(rows, 8)).square().sum().backward()
        inside.wait_for_code(model)
        found = [p.grad.double().sum() for p in model.parameters() if p.grad is not None]
        sums.append(float(sum(found)))
    return sums[0]


def code(model: nn.Module) -> Any:
    """How many stages were found, and how many compiled."""
    return explain(model, changes=False).code["stages"]


ELSEWHERE = """
import other
import torch
from tests.models.test_code_to_come import code, streamed_layers, trained
torch.set_num_threads(1)
model = streamed_layers()
print(trained(model), code(model).made)
"""


@needs_compiler
def test_no_graph_is_compiled_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes compile all but the largest graph, and this one finds it. So does another run,
    whatever it has imported first, with the same numbers; its log says so."""
    with monkeypatch.context() as patient:  # this process compiles nothing that it may ask for
        patient.setattr("concurrent.futures.Future.cancel", lambda self: False)
        patient.setenv("MEGACOMPILE_COMPILE_PROCESSES", "1")
        inside.start_processes()
        model = streamed_layers()
        found = trained(model)
    stages = code(model)
    assert stages.made == 1 and stages.found > 2

    (tmp_path / "other.py").write_text("import torch\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-c", ELSEWHERE, PYTHONPATH=paths, MEGACOMPILE_LOG="compile")
    total, made = done.stdout.split()
    assert made == "0" and float(total) == found
    lines = [line for line in done.stderr.splitlines() if " graphs in " in line]
    said = [line.partition("compiled ")[2].replace("(", "").split() for line in lines]
    assert said and all(words[0] == words[5] for words in said), "all of them from the cache"
