"""What megacompile says while it works: the log by subject, warnings, one line on stderr."""

from __future__ import annotations

import importlib.util
import io
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, NAdam
from torch.optim.lr_scheduler import LambdaLR

from megacompile import log, megacompile, notices, progress, schedules
from megacompile.errors import OptionError
from megacompile.progress import bar, line, now, phase
from tests.training import adamw, data, net
from tests.zoo import stack, step, twins


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends without the variable."""
    monkeypatch.delenv(log.VARIABLE, raising=False)
    log.configure()
    yield
    monkeypatch.delenv(log.VARIABLE, raising=False)
    log.configure()


def levels() -> dict[str, int]:
    return {s: log.logger(s).level for s in log.SUBJECTS if log.logger(s).level}


def train() -> torch.nn.Module:
    model: torch.nn.Module = twins(stack()[0], progress=False)[1]
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, stack()[1])
    optimizer.step()
    return model


# --- the log


INFO, DEBUG = logging.INFO, logging.DEBUG
ALL = dict.fromkeys(log.SUBJECTS, INFO)
VALUES: dict[str, dict[str, int]] = {
    "": {},
    "schedule,": {"schedule": INFO},
    " +passes , plan ": {"passes": DEBUG, "plan": INFO},
    "all,+plan": {**ALL, "plan": DEBUG},
}


@pytest.mark.parametrize("value", VALUES)
def test_the_variable_sets_levels_and_the_handler(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the subjects that it names; and takes them back."""
    root = logging.getLogger("megacompile")
    log.logger("memory").setLevel(DEBUG)
    monkeypatch.setenv(log.VARIABLE, value)
    log.configure()
    kept = {} if "memory" in VALUES[value] else {"memory": DEBUG}
    assert levels() == {**VALUES[value], **kept}
    assert len(root.handlers) == bool(value) and root.propagate == (not value)
    monkeypatch.setenv(log.VARIABLE, "")
    log.configure()
    assert levels() == kept and root.handlers == [] and root.propagate
    log.logger("memory").setLevel(logging.NOTSET)


def test_an_unknown_name_is_refused_and_help_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("schedule,plans", "+", "-plan", "schedule;plan"):
        monkeypatch.setenv(log.VARIABLE, value)
        with pytest.raises(OptionError) as caught:
            megacompile(torch.nn.Linear(2, 2), device="cpu")
        assert value in str(caught.value)
    monkeypatch.setenv(log.VARIABLE, "help")
    for _ in range(2):
        megacompile(torch.nn.Linear(2, 2), device="cpu")
    assert capsys.readouterr().err == log.help_text() + "\n"
    assert all(name in log.help_text() for name in log.SUBJECTS) and levels() == {}


def test_what_is_asked_for_is_printed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    root = logging.getLogger("megacompile")
    assert root.handlers == [] and root.level == logging.WARNING
    assert capsys.readouterr().err == "", "without the variable"
    monkeypatch.setenv(log.VARIABLE, "schedule,plan")
    model = train()
    printed = capsys.readouterr().err
    (schedule,) = schedules(model)
    assert schedule.table() in printed and schedule.code() not in printed, "that is DEBUG"
    subjects = {text.split()[2] for text in printed.splitlines() if " megacompile." in text}
    assert subjects == {"megacompile.schedule", "megacompile.plan"}


def messages(caplog: pytest.LogCaptureFixture, subject: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == f"megacompile.{subject}"]


def test_every_subject_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "megacompile"):
        model = train()
    (schedule,) = schedules(model)
    ours = {r.name for r in caplog.records if r.name.startswith("megacompile")}
    subjects = set(log.SUBJECTS) - {"compile", "ranks"}  # in eager mode, in one process
    assert ours == {f"megacompile.{subject}" for subject in subjects}
    nodes = 0
    for record in schedule.history:
        text = f"{record.name} {record.time_s * 1e3:.1f} ms, {nodes} -> {record.nodes} nodes"
        assert f"Stack: {text}" in messages(caplog, "passes")
        nodes = record.nodes
    assert schedule.code() in messages(caplog, "schedule")


def test_texts_are_made_only_where_they_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    made: list[str] = []
    text = log.Lazy(lambda: made.append("made") or "made")  # type: ignore[func-returns-value]
    with caplog.at_level(logging.INFO, "megacompile.plan"):
        log.logger("plan").debug("%s", text)
        assert made == []
        log.logger("plan").info("%s", text)
        assert messages(caplog, "plan") == ["made"] and made


# --- warnings point at the user's line


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.a(x))
        return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def in_eager(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight  # type: ignore[no-any-return]


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = in_eager(self.b, self.a(x))
        return result


def outside(model: Any, scheduler: bool = False) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    if scheduler:  # it wraps `optimizer.step`
        LambdaLR(optimizer, lambda step: 1.0)
    (model.a(torch.ones(2, 8)).sum() + model.b.weight.square().sum()).backward()
    optimizer.step()  # the line


def another_optimizer(model: nn.Module) -> None:
    optimizer = NAdam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()  # the line


def shared(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    kept = [value.view(-1) for value in state.values()]
    model(torch.ones(2, 8))  # the line
    del kept


def compiled(model: nn.Module) -> None:
    model.compile()  # the line


def called(model: nn.Module) -> None:
    model(torch.ones(2, 8))  # the line


CASES: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "outside": (outside, "no schedule"),
    "outside, scheduler": (lambda model: outside(model, True), "no schedule"),
    "another optimizer": (another_optimizer, "NAdam"),
    "shared": (shared, "shares its memory"),
    "compile()": (compiled, "compile()"),
    "graph break": (called, "eager mode"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_points_at_the_users_line(case: str) -> None:
    run, text = CASES[case]
    model = megacompile((Breaks if case == "graph break" else Net)(), device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model)
    (said,) = [each for each in caught if text in str(each.message)]
    assert said.filename == __file__
    assert "# the line" in Path(__file__).read_text().splitlines()[said.lineno - 1]


def test_once_for_a_line_and_in_a_thread_of_ours() -> None:
    """Python's own filter counts by the line that is shown."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            notices.warn("a text")
        notices.warn("a text")
        thread = threading.Thread(target=notices.warn, args=("another",))
        thread.start()
        thread.join()
    assert [each.filename for each in caught] == [__file__, __file__, notices.__file__]


def fresh(module: ModuleType) -> Any:
    """The same module with nothing said yet: what it remembers is the process's."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", module.__file__)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look there
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_say_once_what_is_the_same(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is the first one of another host. Without the process group, it is no rank."""
    mine = fresh(notices)
    monkeypatch.setenv("LOCAL_RANK", {0: "0", 1: "0", 2: "1"}[rank])
    there = True
    mine.in_rank(rank, is_first=rank == 0, is_there=lambda: there)
    mine.in_rank(rank, is_first=False, is_there=lambda: there)  # of another mesh

    def said() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for whose in mine.Whose:
                mine.warn(whose.name, whose)
        return [str(each.message) for each in caught]

    assert said() == ["ALL", "HOST", "RANK"][rank:2] + [f"rank {rank}: RANK"]
    there = False
    assert said() == ["ALL", "HOST", "RANK"]


# --- one line on stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest puts its own stderr there when a test begins."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def shown(file: io.StringIO) -> list[str]:
    """What the line said, one after the other, "" where it was gone; what it had is forgotten."""
    texts = [t.partition("megacompile: ")[2] for t in file.getvalue().split("\r\x1b[K")[1:]]
    file.seek(0)
    file.truncate(0)
    return texts


def one_step(model: nn.Module, optimizers: list[Any]) -> None:
    model(**data(0)).backward()
    for optimizer in optimizers:
        optimizer.step()


FIRST = (
    *("capturing the model", "planning the step", "running the first step"),
    *("running the first backward", "making host memory", "preparing the update"),
)


def test_the_first_step_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in its turn, and the next step says nothing; off a terminal nor does the first."""
    terminal = terminal_for(monkeypatch)
    model = megacompile(net(), device="cpu", lowering="eager")
    optimizers = adamw(model)
    one_step(model, optimizers)
    texts = shown(terminal)
    assert list(dict.fromkeys(text for text in texts if text)) == [f"{t} ..." for t in FIRST]
    assert texts[-1] == "" and not progress._lines
    one_step(model, optimizers)
    assert terminal.getvalue() == ""
    for file, option in ((Terminal(), False), (io.StringIO(), None)):
        monkeypatch.setattr(sys, "stderr", file)
        model = megacompile(net(), device="cpu", lowering="eager", progress=option)
        one_step(model, adamw(model))
        assert "\r" not in file.getvalue()


def test_off_a_terminal_a_long_wait_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is waited for at that moment."""
    timers: list[Any] = []

    def timer(time_s: float, end: Callable[[], None]) -> Any:
        """Ends when a test says so."""
        timers.append(SimpleNamespace(end=end, on=True, start=lambda: None))
        timers[-1].cancel = lambda made=timers[-1]: setattr(made, "on", False)
        return timers[-1]

    mine = fresh(progress)
    monkeypatch.setattr(threading, "Timer", timer)
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with mine.line("one", False):
        assert timers == [], "progress=False"
    with mine.line("one", None):
        pass
    assert not timers[-1].on, "too short"
    with mine.line("one", None), mine.phase("two"):
        timers[-1].end()
        timers[-1].end()
    assert file.getvalue().startswith("megacompile: two ... (") and file.getvalue().count("\n") == 1
    count = len(timers)
    with mine.line("three", None):
        assert len(timers) == count


def test_it_is_gone_when_the_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    model = megacompile(net(), device="cpu", lowering="eager")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    model.layers[1].register_forward_hook(torch.compiler.disable(interrupt))
    with pytest.raises(KeyboardInterrupt):
        model(**data(0))
    assert shown(terminal)[-1] == "" and not progress._lines


def test_lines_phases_bars_and_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says how long each took, shown or not; phases of one name are one."""
    terminal = terminal_for(monkeypatch)
    with phase("without a line"):
        now("nothing")
    assert terminal.getvalue() == ""
    with line("one", None):
        with phase("two"), phase("three"):
            pass
        with line("four", None):
            pass
    assert shown(terminal) == [
        *("one ...", "two ...", "three ...", "two ...", "one ..."),
        *("four ...", "", "one ...", ""),
    ]
    with line("one", None):
        thread = threading.Thread(target=now, args=("another",))
        thread.start()
        thread.join()
    assert shown(terminal) == ["one ...", ""], "the line is of one thread"
    with line("one", None), bar("two", 3, None) as advance:
        texts = shown(terminal)
        assert texts[0] == "one ..." and texts[-1].startswith("two")
        advance(3)
    monkeypatch.setattr(time, "perf_counter", iter(range(100)).__next__)
    with caplog.at_level(logging.INFO, "megacompile.time"), line("running", False):
        for _ in range(3):
            with phase("making"):
                pass
    assert messages(caplog, "time") == ["running took 7.00 s", "making took 3.00 s"]
