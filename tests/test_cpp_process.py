"""The C++ of an update is compiled by a process beside this one; until then torch makes it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_fork import in_child
from torch.optim import SGD, AdamW, RMSprop

from megacompile import compat, megacompile
from megacompile.beside import process as beside
from megacompile.code_counts import CodeCounts
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.blockwise import absmax_numel
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.optim.update import Update
from megacompile.runtime.step import hooks
from megacompile.runtime.updates import compiled as module
from megacompile.runtime.updates import cpp
from megacompile.runtime.updates.compiled import Compiled, compiled
from megacompile.runtime.updates.cpp import Request, agrees, kind_of
from megacompile.runtime.updates.cpp_process import CppProcess
from megacompile.runtime.updates.update import UpdatePath
from tests.draws import drawn
from tests.inside import ways
from tests.training import adamw, data, net, train
from tests.zoo import equal, twins

ROOT = Path(__file__).resolve().parent.parent
NUMEL = 1000
TIMEOUT_S = 120

needs_compiler = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

UNTIL_THE_END = (  # in place of what compiles: it ends as that does
    "import pickle, sys\n"
    "path, name, request = pickle.load(sys.stdin.buffer)\n"
    "sys.path[:] = path\n"
    "import importlib\n"
    "importlib.import_module('megacompile.beside.process')._until_it_closes(print)\n"
)


def update_of(dtype: torch.dtype = torch.float32) -> Update:
    generator = torch.Generator().manual_seed(0)
    param, grad, m, v = (torch.rand(NUMEL, generator=generator).to(dtype) for _ in range(4))
    group = AdamW([torch.nn.Parameter(param)]).param_groups[0]
    return Update(param, grad, (m, v, None), ADAM.hyper(group, step=3))


def update_in_8_bits() -> Update:
    wide = update_of(torch.bfloat16)
    codes = torch.zeros(NUMEL, dtype=torch.uint8), torch.zeros(absmax_numel(NUMEL))
    return wide._replace(states=(codes, codes, None))


def cloned(update: Update) -> Update:
    return update.map(lambda _, tensor: tensor.clone())


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Inductor's caches are empty, and nothing of a rule is known."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process never comes to an end by itself."""
    monkeypatch.setattr(beside, "_PROGRAM", UNTIL_THE_END)


def process_of(rule: Compiled) -> subprocess.Popen[bytes]:
    ((_, process),) = rule._beside.values()
    return process._process


@needs_compiler
def test_it_is_compiled_elsewhere_and_found_here(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing compiles here meanwhile, and nothing is compiled again: not even by another rule
    that knows of nothing, as in another run."""
    update = update_of()
    rule = Compiled(ADAM)
    with monkeypatch.context() as planted:
        planted.setattr(module, "compile_update", None)
        rule.expect(update)
        assert not rule.ready(update)
        assert not rule.ready(update)
    rule.wait()
    ((request, process),) = rule._beside.values()
    assert request.is_done and request.agreed, process.complaint()
    before = compat.cache_counts()
    counts = CodeCounts()
    monkeypatch.setattr(module, "UPDATES", counts)
    known: list[list[str]] = []
    with monkeypatch.context() as planted:
        planted.setattr(compat, "use_vector_isas", known.append)
        assert rule.ready(update)
    assert known == [compat.vector_isas()], "which takes long to find out"
    after = compat.cache_counts()
    assert after.since(before) == (1, 0)
    assert (counts.found, counts.beside, counts.made) == (1, 1, 0) and counts.time_s > 0
    mine, its = cloned(update), cloned(update)
    with torch.no_grad():
        rule(mine)
    apply(ADAM, its)
    assert all(equal(a, b) for (_, a), (_, b) in zip(mine.tensors(), its.tensors(), strict=True))
    monkeypatch.setattr(module, "CppProcess", None)
    torch.compiler.reset()
    assert Compiled(ADAM).ready(update)
    assert compat.cache_counts().made == after.made
    assert (counts.found, counts.beside, counts.made) == (2, 1, 0)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert Compiled(ADAM).ready(update)
    assert (counts.found, counts.beside, counts.made) == (2, 1, 1)


@pytest.mark.thorough
@needs_compiler
def test_it_is_found_though_settings_have_changed(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's settings, and what depends on whether a process sees a GPU."""
    update, rule = update_of(), Compiled(ADAM)
    rule.expect(update)
    rule.wait()
    monkeypatch.setattr("torch._inductor.compile_fx.has_triton", lambda: True)  # on a GPU
    before = compat.cache_counts()
    with torch._inductor.config.patch({"triton.unique_kernel_names": False}):
        assert rule.ready(update)
        assert not torch._inductor.config.triton.unique_kernel_names
    assert compat.cache_counts().since(before) == (1, 0)


@pytest.mark.thorough
@needs_compiler
def test_it_is_found_whatever_was_captured_before(cold: Path) -> None:
    """With states in 8 bits, too: their table is no constant of the graph, whose name would count
    what Dynamo has done in this process."""
    update, rule = update_in_8_bits(), Compiled(ADAM)
    rule.expect(update)
    rule.wait()
    torch.compile(torch.sin, backend="eager")(torch.ones(3))
    before = compat.cache_counts()
    assert rule.ready(update)
    assert compat.cache_counts().since(before) == (1, 0)


@needs_compiler
def test_a_run_that_switches_is_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The update is compiled between two steps; each parameter has the same bits as if it never
    was, and as if it always was."""
    monkeypatch.setattr(cpp, "_sources", lambda: str(tmp_path))
    _, switches = twins(net(), lowering="inductor")
    monkeypatch.setattr(module, "_COMPILED", {})
    optimizers = adamw(switches)
    with monkeypatch.context() as planted:
        planted.setattr(CppProcess, "status", None)  # it is not over, whatever it does
        train(switches, optimizers, 2)
    assert ways(switches) == {UpdatePath.TORCH}
    compiled(ADAM).wait()
    train(switches, optimizers, 2)
    assert ways(switches) == {UpdatePath.COMPILED}
    for ready in (True, False):
        _, steady = twins(net(), lowering="inductor")
        with monkeypatch.context() as planted:
            if not ready:
                planted.setattr(Compiled, "ready", lambda *_: False)
            theirs = adamw(steady)
            train(steady, theirs, 2)
            assert ways(steady) == {UpdatePath.COMPILED if ready else UpdatePath.TORCH}
            train(steady, theirs, 2)
        for mine, its in zip(switches.parameters(), steady.parameters(), strict=True):
            assert equal(mine.detach(), its.detach())


@pytest.mark.parametrize(
    ("made", "options", "states"),
    [
        (lambda model: None, {}, (torch.float32, torch.float32, None)),
        (lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), {}, (torch.float32,)),
        (lambda model: SGD(model.parameters(), lr=0.1), {}, (None,)),
        (
            lambda model: AdamW(model.parameters(), amsgrad=True),
            {"state_dtype": torch.bfloat16},
            3 * (torch.bfloat16,),
        ),
        (lambda model: RMSprop(model.parameters()), {}, None),
    ],
    ids=["none yet", "momentum", "plain", "amsgrad", "of no rule"],
)
def test_it_begins_when_the_first_backward_is_planned(
    made: Any, options: Any, states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the optimizer that there is, before it steps; and the step asks for nothing else."""
    expected: list[Update] = []
    asked: list[Update] = []
    monkeypatch.setattr(Compiled, "expect", lambda _, update: expected.append(update))
    monkeypatch.setattr(Compiled, "ready", lambda _, update: bool(asked.append(update)))  # type: ignore[func-returns-value]
    monkeypatch.setattr(compat, "compile_inductor", lambda stage, _: stage)  # not the subject
    gc.collect()  # optimizers of other tests
    model = net()
    optimizer = made(model)
    megacompile(model, device="cpu", lowering="inductor", **options)
    with torch.no_grad():
        model(**data(0))
    assert not expected
    model(**data(0)).backward()
    kinds = {tuple(getattr(s, "dtype", None) for s in update.states) for update in expected}
    assert kinds == ({states} if states else set())
    if optimizer is not None:
        optimizer.step()
    if states and optimizer is not None:
        assert {kind_of(update) for update in asked} == {kind_of(update) for update in expected}


def test_where_nothing_is_compiled_nobody_looks_for_optimizers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That goes through every object of the process."""
    monkeypatch.setattr(hooks, "constructed", None)
    model = net()
    megacompile(model, device="cpu", lowering="eager")
    model(**data(0)).backward()
    with monkeypatch.context() as without:
        without.setattr(compat, "has_cpp_compiler", lambda: False)
        without.setattr(compat, "compile_inductor", lambda stage, _: stage)  # not the subject
        model = net()
        megacompile(model, device="cpu", lowering="inductor")
        model(**data(0)).backward()


def test_where_the_backward_updates_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "expect", None)
    monkeypatch.setattr(compat, "compile_inductor", lambda stage, _: stage)  # not the subject
    model = net()
    optimizer = AdamW(model.parameters())
    megacompile(model, device="cpu", lowering="inductor", optimizer=optimizer)
    model(**data(0)).backward()


@needs_compiler
def test_without_a_compiler_torch_goes_on(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and with the compiler's reason."""
    update, rule = update_of(), Compiled(ADAM)
    with torch._inductor.config.patch({"cpp.cxx": ("/bin/false",)}):
        assert not rule.ready(update)
    rule.wait()
    with pytest.warns(UserWarning, match="megacompile: the adam update cannot be compiled to C"):
        assert not rule.ready(update)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not rule.ready(update)
        rule.expect(update)
    assert not rule._beside


def test_where_no_process_starts_it_is_compiled_here(
    cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    executable = sys.executable
    monkeypatch.setattr(module, "compile_update", lambda *args: made.append(args))
    monkeypatch.setattr(sys, "executable", str(cold / "gone"))
    assert Compiled(ADAM).ready(update_of())
    monkeypatch.setattr(sys, "executable", "")
    assert Compiled(ADAM).ready(update_of())
    monkeypatch.setattr(sys, "executable", executable)
    with torch._inductor.config.patch({"custom_partitioner_fn": lambda: None}):
        assert Compiled(ADAM).ready(update_of())
    monkeypatch.setattr(compat, "code_cache", lambda: None)
    assert Compiled(ADAM).ready(update_of())
    assert len(made) == 4


def test_one_that_was_killed_is_made_up_for(
    cold: Path, endless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(module, "compile_update", lambda *args: made.append(args))
    rule, update = Compiled(ADAM), update_of()
    assert not rule.ready(update)
    process_of(rule).kill()
    rule.wait()
    assert rule.ready(update) and len(made) == 1


def test_ctrl_c_is_not_for_it(cold: Path, endless: None) -> None:
    """A terminal sends it to all processes of the foreground group."""
    rule = Compiled(ADAM)
    rule.expect(update_of())
    process = process_of(rule)
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    assert os.getsid(process.pid) != os.getsid(0)


def test_nobody_asks_any_more(cold: Path, endless: None) -> None:
    """It ends with the rule that it compiles."""
    rule = Compiled(ADAM)
    rule.expect(update_of())
    process = process_of(rule)
    del rule
    assert process.returncode == -signal.SIGKILL


@needs_fork
def test_a_forked_child_has_no_part_in_it(cold: Path, endless: None) -> None:
    """It ends no process of its parent's, and does not keep it alive; it begins one of its own."""
    rule, update = Compiled(ADAM), update_of()
    rule.expect(update)
    (before,) = rule._beside.values()

    def child() -> tuple[int, bool, int | None]:
        forgotten = len(rule._beside)
        before[1].stop()  # as at the end of the child
        rule.expect(update)
        ((_, its),) = rule._beside.values()
        return forgotten, process_is_alive(before[1]._process.pid), its.status

    assert in_child(child) == (0, True, None)
    assert process_of(rule).poll() is None


def process_is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@needs_fork
@pytest.mark.parametrize("end", drawn(["os.kill(os.getpid(), signal.SIGKILL)"], ["sys.exit()"]))
def test_it_ends_with_this_process(cold: Path, end: str) -> None:
    """However that ends: its pipe is closed, which a forked child does not keep open."""
    program = f"""
import os, signal, sys, time
from tests.test_cpp_process import ADAM, Compiled, UNTIL_THE_END, beside, process_of, update_of
beside._PROGRAM = UNTIL_THE_END
rule = Compiled(ADAM)
rule.expect(update_of())
if os.fork() == 0:
    os.close(1)
    time.sleep({TIMEOUT_S})
    os._exit(0)
os.set_inheritable(1, False)
print(process_of(rule).pid, flush=True)
{end}
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            parent.wait(TIMEOUT_S)
            if hasattr(os, "pidfd_open"):
                wait_for_end(pid)
            assert not process_is_alive(pid) or is_zombie(pid)
        finally:
            os.killpg(parent.pid, signal.SIGKILL)  # the forked child


def wait_for_end(pid: int) -> None:
    """Of a process that is no child of this one."""
    import select

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([fd], [], [], TIMEOUT_S)
    os.close(fd)
    assert ended


def is_zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_what_rounds_otherwise_is_found(cold: Path) -> None:
    update = update_of()

    def code(*args: Any) -> None:
        apply(ADAM, update)

    assert not agrees(ADAM, update, code)


def test_what_it_depends_on_is_in_the_key(cold: Path) -> None:
    def name(update: Update) -> str:
        return Request.of(ADAM, update, cold).note

    usual = name(update_of())
    assert usual == name(update_of())
    assert usual != name(update_of(torch.bfloat16))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 5)
    try:
        assert usual != name(update_of())
    finally:
        torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float64)
    try:
        assert usual != name(update_of())
    finally:
        torch.set_default_dtype(torch.float32)
