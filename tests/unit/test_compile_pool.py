"""Processes that compile stages and updates: this one goes on whatever they do.

Scripts stand in for them; tests/models/test_code_to_come.py has a real one. Until the C++ of an
update is compiled, torch makes it.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import fx, nn
from torch.optim import SGD, AdamW, RMSprop

from megacompile import compat, megacompile
from megacompile.beside import compile_pool
from megacompile.beside.compile_pool import CompilePool, GraphToCompile
from megacompile.errors import OptionError
from tests import inside
from tests.zoo import uncompiled

CPU = torch.device("cpu")
Run = Callable[[str], None]

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs sh")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Call it with what each process does, a line of sh; none is left behind."""
    script = tmp_path / "python"

    def does(line: str) -> None:
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    _OF_OTHERS[:] = psutil.Process().children(recursive=True)
    yield does
    compile_pool.stop()
    assert alive() == []


_OF_OTHERS: list[psutil.Process] = []  # that earlier tests have started, and that end in time


def processes() -> list[psutil.Process]:
    """Those that this test has started, and that are not over."""
    found = psutil.Process().children(recursive=True)
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE and p not in _OF_OTHERS]


def alive() -> list[int]:
    return [each.pid for each in processes()]


def until_over() -> None:
    """Wait for processes that end, or were killed: they are still there for a moment."""
    until_s = time.monotonic() + 60
    while processes() and time.monotonic() < until_s:
        time.sleep(0.01)


def ended() -> None:
    """Wait for the threads that wait for the processes of a pool."""
    for thread in threading.enumerate():
        if thread.name == "megacompile-compile":
            thread.join()


def graph() -> GraphToCompile:
    """sin(x)"""
    made = fx.Graph()
    x = made.placeholder("x")
    made.output((made.call_function(torch.ops.aten.sin.default, (x,)),))
    module = fx.GraphModule(nn.Module(), made)
    with compat.fake_mode():
        return GraphToCompile(module, module, [torch.ones(3)])


TAKE = "echo ready; head -c 100 > /dev/null; "  # and what it does with a graph
ANSWERS = {
    TAKE + "echo ready; exec sleep 100": "",
    TAKE + "echo 'ValueError: no graph'; exec sleep 100": "ValueError: no graph",
    TAKE + "exit 1": "",  # what is said depends on whether the pipe breaks first
    TAKE + "exec sleep 100": "it takes more than",
}


@pytest.mark.parametrize("does", ANSWERS)
def test_nobody_waits_for_ever(
    does: str, children: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is compiled by a process, or this one compiles it, for a reason that is logged."""
    monkeypatch.setattr("concurrent.futures.Future.cancel", lambda self: False)  # all have begun
    children(does)
    pool = CompilePool(1, None, 1, patience_s=0.3)
    asked = graph()
    with caplog.at_level(logging.INFO, "megacompile.compile"):
        pool.submit([asked]).take(asked.part)
    succeeds = "echo ready; exec" in does
    assert ("no process compiled" not in caplog.text) == succeeds
    assert ANSWERS[does] in caplog.text
    pool.stop()


def test_what_no_process_has_begun_is_withdrawn(children: Run) -> None:
    """This process compiles it, and does not wait for one that does not get ready."""
    children("exec sleep 100")
    pool = CompilePool(1, None, 1)
    first, second = graph(), graph()
    jobs = pool.submit([first, second])
    with jobs:
        jobs.take(first.part)
        assert not jobs.done() and not pool.is_over
    assert jobs.done()
    pool.stop()


@pytest.mark.parametrize("does", ["exit 1", "echo nothing; exec sleep 100"])
def test_processes_that_do_not_get_ready_are_over(
    does: str, children: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends before it has read its request, which is longer than a pipe holds."""
    if does == "exit 1":
        monkeypatch.setattr(sys, "path", [*sys.path, "/" + "x" * 2**20])
    children(does)
    pool = CompilePool(1, None, 1)
    asked = graph()
    jobs = pool.submit([asked])
    ended()
    assert pool.is_over and jobs.done()
    jobs.take(asked.part)


def test_their_children_end_with_them(children: Run, tmp_path: Path) -> None:
    """Inductor's processes, which compile kernels."""
    number = tmp_path / "number"
    children(f"sleep 30 > /dev/null 2>&1 < /dev/null & echo $! > {number}; echo ready; wait")
    pool = CompilePool(1, None, 1)
    jobs = pool.submit([graph()])
    while not number.exists() or not number.read_text().strip():
        time.sleep(0.01)
    child = psutil.Process(int(number.read_text()))
    pool.stop()
    _, left = psutil.wait_procs([child], timeout=5)
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]
    assert jobs.done()


def test_they_end_with_an_error_and_are_kept_for_later_programs(
    children: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for those; the processes are there until they have been idle."""

    def started() -> list[int]:
        for _ in range(2):  # the second time there are some
            compile_pool.start(CPU)
        found = alive()
        assert len(found) == 2
        return found

    def exhausted(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory for a bucket")

    children("echo ready; exec sleep 100")
    monkeypatch.setenv(compile_pool.VARIABLE, "2")
    layer = nn.Linear(2, 2)
    started()
    with pytest.raises(KeyboardInterrupt), compile_pool.submit(lambda: [graph()], CPU, count=1):
        raise KeyboardInterrupt
    with monkeypatch.context() as planted, pytest.raises(MemoryError):
        planted.setattr(torch, "empty", exhausted)
        megacompile(layer, device="cpu", lowering="inductor")
    assert alive() == [], "a model that is refused leaves none behind"
    started()
    assert compile_pool.submit(lambda: [graph()], CPU).futures
    assert len(kept := alive()) == 2
    with compile_pool.submit(lambda: [graph()], CPU, count=1) as jobs:
        jobs.take(graph().part)  # nobody was asked for it
    assert alive() == kept
    with torch._inductor.config.patch(max_autotune=True):  # kernels are timed, on the device
        assert not compile_pool.submit(lambda: [graph()], CPU).futures


def test_they_are_started_for_many_graphs_and_end_when_idle(
    children: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    children("echo ready; exec sleep 100")
    monkeypatch.setenv(compile_pool.VARIABLE, "2")
    with compile_pool.submit(lambda: [], CPU, count=7):
        assert alive() == []
    with (
        torch._inductor.config.patch(max_autotune=True),
        compile_pool.submit(lambda: [], CPU, count=8),
    ):
        assert alive() == []
    with compile_pool.submit(lambda: [], CPU, count=8):
        assert len(alive()) == 2
    compile_pool.stop()
    CompilePool(2, None, 1, idle_s=0.1).submit([])
    ended()
    assert alive() == []


def test_as_many_are_started_as_somebody_asks_for(
    children: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked where there is no GPU; without a cache, or in one thread, they are no use."""
    children("exec sleep 100")
    for value, options, count in (
        ("", {}, 0),
        ("3", {"fx_graph_cache": False}, 0),
        ("3", {"compile_threads": 1}, 0),
        ("3", {}, 3),
    ):
        monkeypatch.setenv(compile_pool.VARIABLE, value)
        with torch._inductor.config.patch({"compile_threads": 8, **options}):
            compile_pool.start(CPU)
        assert len(alive()) == count, value
    compile_pool.stop()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compile_pool.start(CPU)
    assert not compile_pool.submit(lambda: [graph()], CPU).futures
    for value in ("many", "-1", "2.5"):
        monkeypatch.setenv(compile_pool.VARIABLE, value)
        with pytest.raises(OptionError):
            compile_pool.start(CPU)


@pytest.mark.parametrize(
    ("sent", "wanted"), [(b"", 0), (b"c__main__\nOfTheUser\n.", -signal.SIGKILL)]
)
def test_a_process_that_listens_ends_as_any_other(sent: bytes, wanted: int) -> None:
    """And when it cannot read what it gets, such as a class that is not there: whoever waits for
    its answer would wait in vain."""
    script = (
        "import time\n"
        "from megacompile.beside.process import end_with_the_pipe\n"
        "end_with_the_pipe()\n"
        f"time.sleep({60 if sent else 0.2})  # the thread reads\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        process.stdin.write(sent)
        process.stdin.flush()
        assert process.wait(50) == wanted


FOREVER = "exec sleep 1000"
DTYPE = torch.float16  # of its own, as what there is already is not asked for again


@pytest.fixture
def beside(children: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """The same; Inductor's caches are empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    children(FOREVER)
    # Inductor would start the script, too: to compile kernels, and to try vector instructions.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", lambda: [])
    monkeypatch.setattr(torch._inductor, "compile", uncompiled)
    gc.collect(1)  # optimizers of other tests
    with torch._inductor.config.patch(compile_threads=1):
        yield children
    for each in processes():
        each.kill()
    until_over()


def trained(make: Callable[[nn.Module], Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """A small model and its optimizer, which is given to megacompile() if `options` have one."""
    model = nn.Linear(4, 4).to(DTYPE)
    optimizer = make(model)
    given = {"lowering": "inductor", **options}
    if "optimizer" in options:
        given["optimizer"] = optimizer
    return megacompile(model, device="cpu", progress=False, **given), optimizer


def backward(model: Any) -> None:
    model(torch.ones(2, 4, dtype=DTYPE)).sum().backward()


def test_a_fork_while_a_process_is_waited_for(beside: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data loaders fork in the first step. The child closes the pipes that threads here read."""
    monkeypatch.setenv(compile_pool.VARIABLE, "2")
    with torch._inductor.config.patch(compile_threads=8):
        compile_pool.start(CPU)
    assert len(processes()) == 2
    time.sleep(0.2)  # until the threads read
    child = os.fork()
    if child == 0:
        os._exit(0)
    until_s = time.monotonic() + 20
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until_s:
        time.sleep(0.01)
    if found == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    compile_pool.stop()
    assert found == (child, 0)


def test_a_process_that_refuses_is_believed(beside: Run) -> None:
    """Torch makes the update for good; that is said once, with the compiler's reason."""
    beside("echo 'no compiler here' >&2; exit 3")
    inside.say_again()
    model, optimizer = trained(lambda model: AdamW(model.parameters()), {})

    def step() -> None:
        backward(model)
        optimizer.step()
        assert inside.backends(model) == {"torch"}

    with pytest.warns(UserWarning, match="compiler") as said:
        step()
        until_over()
        step()
    assert sum("compiler here" in str(each.message) for each in said) == 1
    beside(FOREVER)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert processes() == [], "nobody is asked again"


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], list[str]]] = {
    "amsgrad": (
        lambda model: AdamW(model.parameters(), amsgrad=True),
        {"state_dtype": torch.bfloat16},
        ["adam"],
    ),
    "plain": (lambda model: SGD(model.parameters(), lr=0.1), {}, ["sgd"]),
    "of no rule": (lambda model: RMSprop(model.parameters()), {}, []),
    "in the backward": (lambda model: AdamW(model.parameters()), {"optimizer": None}, []),
    "eager": (lambda model: AdamW(model.parameters()), {"lowering": "eager"}, []),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_it_begins_when_the_first_backward_is_planned(
    case: str, beside: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """For the optimizer that there is, before it steps; and the step asks for nothing else."""
    make, options, rules = OPTIMIZERS[case]
    model, optimizer = trained(make, options)
    with caplog.at_level("INFO", "megacompile.compile"):
        with torch.no_grad():
            model(torch.ones(2, 4, dtype=DTYPE))
        assert begun(caplog) == []
        backward(model)
        assert begun(caplog) == rules
        for each in processes():
            assert os.getpgid(each.pid) == each.pid != os.getpgid(0), "Ctrl-C is not for it"
        optimizer.step()
        assert begun(caplog) == rules


def begun(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The rules that a process compiles."""
    said = [text for text in caplog.messages if "in the background" in text]
    return [text.partition(":")[0] for text in said if "to C++" in text]
