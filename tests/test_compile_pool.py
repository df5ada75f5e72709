"""Stages are compiled by processes beside this one, and found in the caches by this one."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_fork import in_child
from torch import nn

from megacompile import compat, explain, megacompile
from megacompile.beside import compile_pool
from megacompile.beside.compile_pool import CompilePool
from megacompile.errors import HostMemoryError, OptionError
from megacompile.runtime.model.streamed import StreamedModel
from tests import inside
from tests.test_cpp_process import process_is_alive
from tests.zoo import equal

needs_compiler = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Inductor's caches are empty, and no process is left behind."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    compile_pool.stop()


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.LayerNorm(8))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compiled(**options: Any) -> nn.Module:
    return megacompile(net(), device="cpu", lowering="inductor", progress=False, **options)


def start(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> CompilePool:
    """Processes as they are started for a GPU, for the CPU."""
    with monkeypatch.context() as planted:
        planted.setenv(compile_pool.VARIABLE, str(count))
        compile_pool.start(torch.device("cpu"))
    assert compile_pool._pool is not None
    return compile_pool._pool


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process compiles nothing that another one was given."""
    monkeypatch.setattr(Future, "cancel", lambda self: False)


def pids(pool: CompilePool) -> list[int]:
    return [process._process.pid for process in pool._processes]


@needs_compiler
@pytest.mark.usefixtures("patient")
def test_stages_are_compiled_elsewhere_and_found_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them; the numbers are those of code that was compiled here, and the processes end."""
    pool = start(monkeypatch, count=2)
    started = pids(pool)
    assert len(started) == 2
    before = compat.cache_counts()
    model = compiled()
    with caplog.at_level("INFO", "megacompile.compile"):
        found = gradients(model)
    counts = compat.cache_counts().since(before)
    assert counts.made == 0 and counts.found > 2
    stages = explain(model, changes=False).code["stages"]
    assert (stages.found, stages.made) == counts
    assert 0 < stages.beside <= stages.found, "those for another variant are compiled later"
    assert f"{stages.beside} of them compiled by processes beside this one" in caplog.text
    assert "compiled beside it" in str(explain(model, changes=False))
    assert compile_pool._pool is None and not any(map(process_is_alive, started))

    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        expected = gradients(compiled())
    assert all(map(equal, found, expected))


@needs_compiler
@pytest.mark.usefixtures("patient")
def test_a_later_program_is_compiled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its symbols, while it runs without its code; then the code is found here."""
    model = megacompile(
        nn.Sequential(nn.Linear(4, 4)), device="cpu", lowering="inductor", progress=False
    )
    ones = torch.ones(6, 4)
    model(ones[:4]).sum().backward()
    monkeypatch.setenv(compile_pool.VARIABLE, "1")
    before = compat.cache_counts()
    model(ones[:6]).sum().backward()
    assert compat.cache_counts() == before, "nobody compiles here"
    to_come = inside.streamed(model).buckets.plans.compiler.pipeline.to_come  # type: ignore
    assert to_come.load()
    to_come.use()
    counts = compat.cache_counts().since(before)
    assert counts.made == 0 and counts.found == 2
    model(ones[:5]).sum().backward()
    assert compat.cache_counts().since(before) == counts


@needs_compiler
def test_what_no_process_has_begun_is_compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a process that does not get ready."""
    monkeypatch.setattr("megacompile.beside.process._PROGRAM", "import time; time.sleep(1000)")
    pool = start(monkeypatch)
    (pid,) = pids(pool)
    before = compat.cache_counts()
    gradients(compiled())
    assert compat.cache_counts().since(before).made > 2
    assert not process_is_alive(pid)


@needs_compiler
@pytest.mark.usefixtures("patient")
def test_a_process_that_is_killed_is_no_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    carry_out = compile_pool._carry_out

    def kill_it(process: Any, job: Any) -> None:
        os.killpg(process._process.pid, signal.SIGKILL)
        carry_out(process, job)

    monkeypatch.setattr(compile_pool, "_carry_out", kill_it)
    start(monkeypatch)
    with caplog.at_level("INFO", "megacompile.compile"):
        found = gradients(compiled())
    assert "no process compiled a graph" in caplog.text
    assert len(found) == 8


@needs_compiler
@pytest.mark.usefixtures("patient")
def test_a_graph_that_a_process_cannot_compile_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "packed_graph", lambda *_: b"no graph")
    start(monkeypatch)
    before = compat.cache_counts()
    with caplog.at_level("INFO", "megacompile.compile"):
        gradients(compiled())
    assert "no process compiled a graph: UnpicklingError" in caplog.text
    assert compat.cache_counts().since(before).made > 2


@needs_compiler
def test_a_graph_that_cannot_be_sent_is_compiled_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Options of Inductor may be functions."""

    def packed(*_: object) -> bytes:
        return pickle.dumps(lambda: None)

    monkeypatch.setattr(compat, "packed_graph", packed)
    start(monkeypatch)
    with caplog.at_level("INFO", "megacompile.compile"):
        assert len(gradients(compiled())) == 8
    assert "since it cannot be sent" in caplog.text


@needs_compiler
@pytest.mark.usefixtures("patient")
def test_an_interrupt_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start(monkeypatch)
    (pid,) = pids(pool)

    def interrupted(self: Future[None], timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "exception", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gradients(compiled())
    assert not process_is_alive(pid) and compile_pool._pool is None
    monkeypatch.undo()
    assert len(gradients(compiled())) == 8
    names = [thread.name for thread in threading.enumerate() if thread.is_alive()]
    assert "megacompile-compile" not in names


def test_a_model_that_is_refused_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    (pid,) = pids(start(monkeypatch))

    def refused(*_: object) -> None:
        raise HostMemoryError("too little")

    monkeypatch.setattr(StreamedModel, "__init__", refused)
    with pytest.raises(HostMemoryError, match="too little"):
        compiled()
    assert not process_is_alive(pid)


@needs_fork
def test_a_forked_child_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = start(monkeypatch)

    def stop() -> int:
        compile_pool.stop()
        return len(pool._processes)

    (pid,) = pids(pool)
    assert in_child(stop) == 0
    assert process_is_alive(pid)


@needs_compiler
@pytest.mark.usefixtures("patient")
def test_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that hangs is ended, and this one compiles."""
    monkeypatch.setattr(compile_pool, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(compile_pool, "_carry_out", lambda *_: threading.Event().wait(60))
    pool = start(monkeypatch)
    (pid,) = pids(pool)
    before = compat.cache_counts()
    with caplog.at_level("INFO", "megacompile.compile"):
        gradients(compiled())
    assert "no process compiled a graph: it takes more than 0.2 s" in caplog.text
    assert compat.cache_counts().since(before).made > 2
    assert not process_is_alive(pid)


@pytest.mark.parametrize("why", ["nobody asked", "none", "no caches", "one compile thread"])
def test_no_processes_are_started(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "no caches": {"fx_graph_cache": False},
        "one compile thread": {"compile_threads": 1},
    }
    monkeypatch.setenv(compile_pool.VARIABLE, {"nobody asked": "", "none": "0"}.get(why, "4"))
    with torch._inductor.config.patch(kinds.get(why, {"compile_threads": 8})):
        assert compat.compiles_in_processes() == (why not in kinds)
        compile_pool.start(torch.device("cpu"))
    assert compile_pool._pool is None


def test_as_many_are_started_as_somebody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compile_pool, "CompilePool", lambda *given, loads: made.append(given))
    monkeypatch.setenv(compile_pool.VARIABLE, "3")
    with torch._inductor.config.patch(compile_threads=8):
        compile_pool.start(torch.device("cuda", 1))
    assert made == [(3, 1, 4)]


@pytest.mark.parametrize("value", ["many", "-1", "2.5"])
def test_other_numbers_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_pool.VARIABLE, value)
    with pytest.raises(OptionError, match=f"{value}: needed a number of processes"):
        compile_pool.start(torch.device("cpu"))
