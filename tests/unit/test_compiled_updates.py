"""The C++ of an update is compiled by a process beside this one; until then torch makes it.

Scripts stand in for the process; tests/models/test_compiled_updates.py has a real one.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

from megacompile import megacompile
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.rule import Update
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.updates.compiled import Compiled
from megacompile.runtime.updates.cpp import CompileRequest, agrees

NUMEL = 100
Run = Callable[[str], None]
FOREVER = "exec sleep 1000"
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs sh and fork")


def update_of(dtype: torch.dtype = torch.float32) -> Update:
    generator = torch.Generator().manual_seed(0)
    param, grad, m, v = (torch.rand(NUMEL, generator=generator).to(dtype) for _ in range(4))
    group = AdamW([torch.nn.Parameter(param)]).param_groups[0]
    return Update(param, grad, (m, v, None), ADAM.hyper(group, step=3))


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Call it with what each process does, a line of sh. Inductor's caches are empty."""
    script = tmp_path / "python"

    def does(line: str) -> None:
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    does(FOREVER)
    # Inductor would start the script, too: to compile kernels, and to try vector instructions.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", lambda: [])
    with torch._inductor.config.patch(compile_threads=1):
        yield does
    for each in processes():
        each.kill()


def processes() -> list[psutil.Process]:
    """Those that this one has started, and that are not over."""
    found = psutil.Process().children()
    return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]


def test_a_process_that_refuses_is_believed(beside: Run) -> None:
    """Torch makes the update for good; that is said once, with the compiler's reason."""
    beside("echo 'no compiler here' >&2; exit 3")
    update, rule = update_of(), Compiled(ADAM)
    assert not rule.ready(update)
    rule.wait()
    with pytest.warns(UserWarning, match="no compiler here"):
        assert not rule.ready(update)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not rule.ready(update)
        rule.expect(update)
    assert not rule._beside


def test_what_no_process_compiles_is_compiled_here(
    beside: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed, or ends; none can start; options of Inductor cannot be sent."""
    rule, update = Compiled(ADAM), update_of()
    assert not rule.ready(update)
    (process,) = processes()
    process.kill()
    rule.wait()
    assert rule.ready(update)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert Compiled(ADAM).ready(update)
    beside(FOREVER)
    with torch._inductor.config.patch({"custom_partitioner_fn": lambda: None}):
        Compiled(ADAM).expect(update)
    assert processes() == []


def test_ctrl_c_is_not_for_it_and_nobody_asks_any_more(beside: Run) -> None:
    """A terminal sends it to all processes of the foreground group. It ends with its rule."""
    rule = Compiled(ADAM)
    rule.expect(update_of())
    rule.expect(update_of())  # is on its way
    (process,) = processes()
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert os.getsid(process.pid) != os.getsid(0)
    del rule
    assert processes() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_a_forked_child_has_no_part_in_it(beside: Run) -> None:
    """It ends no process of its parent's, and begins one of its own. Nor does it keep the pipe to
    it open, by which a process knows that its parent is gone."""
    beside("exec cat > /dev/null")
    rule, update = Compiled(ADAM), update_of()
    rule.expect(update)
    (process,) = processes()
    theirs = [beside for _, beside in rule._beside.values()]
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.close(end)
        theirs[0].stop()  # as at the end of the child
        forgotten = len(rule._beside) == 0
        rule.expect(update)
        begins = len(rule._beside) == 1 and rule._beside is not None
        os.read(ended, 1)
        os._exit(0 if forgotten and begins else 1)
    os.close(ended)
    assert process.is_running() and process in processes()
    pipe: Any = theirs[0]._process.stdin
    pipe.close()
    assert theirs[0]._process.wait(60) == 0
    os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Layer(nn.Linear):
    """(4, 4), which is small."""

    def __init__(self) -> None:
        super().__init__(4, 4)


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
    case: str, beside: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For the optimizer that there is, before it steps; and the step asks for nothing else."""
    monkeypatch.setattr(torch._inductor, "compile", lambda module, _: stage(module))
    gc.collect(1)  # optimizers of other tests
    make, options, rules = OPTIMIZERS[case]
    dtype = torch.float16  # of its own, as what there is already is not asked for again
    model = Layer().to(dtype)
    optimizer = make(model)
    if "optimizer" in options:
        options = {"optimizer": optimizer}
    megacompile(model, device="cpu", progress=False, **{"lowering": "inductor", **options})
    x = torch.ones(2, 4, dtype=dtype)
    with caplog.at_level("INFO", "megacompile.compile"):
        with torch.no_grad():
            model(x)
        assert begun(caplog) == []
        model(x).sum().backward()
        assert begun(caplog) == rules
        if optimizer is not None:
            optimizer.step()
        assert begun(caplog) == rules


def begun(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The rules that a process compiles."""
    said = [text for text in caplog.messages if "beside the training" in text]
    return [text.partition(":")[0] for text in said if "to C++" in text]


def stage(module: Any) -> Any:
    """In place of Inductor, for stages: the graph as it is."""
    return lambda *given: module(*(given[0] if isinstance(given[0], list) else given))


def test_what_rounds_otherwise_is_found() -> None:
    update = update_of()
    assert agrees(ADAM, update, lambda *given: twin(update, given))
    assert not agrees(ADAM, update, lambda *given: None)


def twin(update: Update, given: tuple[Any, ...]) -> None:
    param, grad, states, *_ = given
    apply(ADAM, update._replace(param=param, grad=grad, states=tuple(states)))


def test_what_it_depends_on_is_in_the_key(tmp_path: Path) -> None:
    def name(update: Update) -> str:
        return CompileRequest.of(ADAM, update, tmp_path).note

    usual = name(update_of())
    assert usual == name(update_of()) != name(update_of(torch.bfloat16))
    threads = torch.get_num_threads()
    changes: list[tuple[Callable[[Any], None], Any, Any]] = [
        (torch.set_num_threads, threads + 5, threads),
        (torch.set_default_dtype, torch.float64, torch.float32),
    ]
    for change, other, there in changes:
        change(other)
        try:
            assert usual != name(update_of())
        finally:
            change(there)
