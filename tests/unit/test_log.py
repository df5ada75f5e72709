"""What megacompile says while it works: the log by subject, warnings, one line on stderr."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, notices, schedules
from megacompile.errors import OptionError
from tests.training import adamw, data, net

VARIABLE, INFO, DEBUG = "MEGACOMPILE_LOG", logging.INFO, logging.DEBUG


def configured(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The variable is read when a model is made."""
    monkeypatch.setenv(VARIABLE, value)
    megacompile(nn.Linear(2, 2), device="cpu")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends without the variable."""
    configured(monkeypatch, "")
    yield
    configured(monkeypatch, "")


def levels() -> dict[str, int]:
    """Of the subjects that have one."""
    found = logging.root.manager.loggerDict.items()
    subjects = {k.partition(".")[2]: v for k, v in found if k.startswith("megacompile.")}
    return {k: v.level for k, v in subjects.items() if isinstance(v, logging.Logger) and v.level}


def one_step(**options: Any) -> tuple[nn.Module, list[Any]]:
    model = megacompile(net(), device="cpu", lowering="eager", **options)
    optimizers: list[Any] = list(adamw(model))
    step(model, optimizers)
    return model, optimizers


def step(model: nn.Module, optimizers: list[Any]) -> None:
    model(**data(0)).backward()
    for optimizer in optimizers:
        optimizer.step()


VALUES: dict[str, dict[str, int]] = {
    "": {},
    "schedule,": {"schedule": INFO},
    " +passes , plan ": {"passes": DEBUG, "plan": INFO},
}


@pytest.mark.parametrize("value", VALUES)
def test_the_variable_sets_levels_and_the_handler(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the subjects that it names; and takes them back."""
    root, memory = logging.getLogger("megacompile"), logging.getLogger("megacompile.memory")
    memory.setLevel(DEBUG)  # the user's own
    configured(monkeypatch, value)
    assert levels() == {**VALUES[value], "memory": DEBUG}
    assert len(root.handlers) == bool(value) and root.propagate == (not value)
    configured(monkeypatch, "")
    assert levels() == {"memory": DEBUG} and root.handlers == [] and root.propagate
    memory.setLevel(logging.NOTSET)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("schedule,plans", "+", "-plan", "schedule;plan"):
        with pytest.raises(OptionError, match="schedule"):
            configured(monkeypatch, value)
    assert levels() == {}


def test_what_is_asked_for_is_printed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "schedule,plan")
    for value, subjects in (
        ("", set[str]()),
        ("plan,schedule", {"plan", "schedule"}),
        ("all,+schedule", {"capture", "plan", "passes", "schedule", "memory", "update", "time"}),
    ):
        monkeypatch.setenv(VARIABLE, value)
        (schedule,) = schedules(one_step()[0])
        printed = capsys.readouterr().err
        words = (line.split() for line in printed.splitlines() if " megacompile." in line)
        assert {each[2] for each in words} == {f"megacompile.{each}" for each in subjects}
        assert (schedule.table() in printed) == ("schedule" in subjects)
        assert (schedule.code() in printed) == ("+" in value), "that is DEBUG"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def in_eager(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight


class Breaks(Net):
    def forward(self, x: Tensor) -> Tensor:
        return in_eager(self.b, self.a(x))


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


CASES: dict[Callable[[nn.Module], None], str] = {
    shared: "shares its memory",
    compiled: "compile()",
    called: "eager mode",
}


@pytest.mark.parametrize("run", CASES)
def test_it_points_at_the_users_line(run: Callable[[nn.Module], None]) -> None:
    model = megacompile((Breaks if run is called else Net)(), device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model)
    (said,) = [each for each in caught if CASES[run] in str(each.message)]
    assert said.filename == __file__
    assert "# the line" in Path(__file__).read_text().splitlines()[said.lineno - 1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_say_once_what_is_the_same(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is the first one of another host. Without the process group, it is no rank."""
    monkeypatch.setenv("LOCAL_RANK", {0: "0", 1: "0", 2: "1"}[rank])
    there = True
    notices.in_rank(rank, is_first=rank == 0, is_there=lambda: there)
    notices.in_rank(rank, is_first=False, is_there=lambda: there)  # of another mesh

    def said() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for whose in notices.Whose:
                notices.warn(whose.name, whose)
        return [str(each.message) for each in caught]

    of_ranks, there = said(), False
    assert of_ranks == ["ALL", "HOST", "RANK"][rank:2] + [f"rank {rank}: RANK"]
    assert said() == ["ALL", "HOST", "RANK"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> Iterator[Callable[[], list[str]]]:
    """What the line has said since it was asked last, "" where it was gone."""
    made, before = Terminal(), sys.stderr

    def shown() -> list[str]:
        texts = [t.partition("megacompile: ")[2] for t in made.getvalue().split("\r\x1b[K")[1:]]
        made.seek(0)
        made.truncate(0)
        sys.stderr = made  # pytest puts its own there when a test begins
        return texts

    yield shown
    sys.stderr = before


FIRST = (
    *("capturing the model", "planning the step", "running the first step"),
    *("running the first backward", "allocating host memory", "preparing the update"),
)


SHORT = ("moving parameters to the host", "compiling stages")  # seen on a busy machine alone


def test_the_first_step_says_what_it_waits_for(
    terminal: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Each in its turn; the next step says nothing, nor one that may not: its log has times."""
    terminal()
    model, optimizers = one_step()
    texts = terminal()
    said = dict.fromkeys(text.removesuffix(" ...") for text in texts if text)
    assert [text for text in said if text not in SHORT] == [*FIRST]
    assert texts[-1] == ""
    step(model, optimizers)
    with caplog.at_level(INFO, "megacompile.time"):
        one_step(progress=False)
    assert terminal() == []
    sys.stderr = io.StringIO()
    one_step(progress=True)  # which is asked for
    assert "moving parameters to the host" in sys.stderr.getvalue()
    took = [record.getMessage() for record in caplog.records if record.name == "megacompile.time"]
    names = [text.partition(" took ")[0] for text in took]
    assert FIRST[0] in names and {*names} <= {*FIRST, *SHORT}, names
    sys.stderr = io.StringIO()
    one_step()
    assert "\r" not in sys.stderr.getvalue(), "off a terminal"


def test_a_later_capture_says_what_it_waits_for(terminal: Callable[[], list[str]]) -> None:
    """On a terminal alone, and not the calls after it."""
    terminal()
    model, optimizers = one_step(dynamic=False)
    terminal()
    longer = {name: torch.cat([value, value]) for name, value in data(0).items()}
    model(**longer)
    texts = terminal()
    assert list(dict.fromkeys(texts)) == ["capturing the model ...", "planning the step ...", ""]
    model(**longer)
    step(model, optimizers)
    assert terminal() == []
    sys.stderr = io.StringIO()
    model(**{name: torch.cat([value] * 3) for name, value in data(0).items()})
    assert sys.stderr.getvalue() == "", "off a terminal"


def test_it_is_gone_when_the_step_fails(terminal: Callable[[], list[str]]) -> None:
    terminal()
    model = megacompile(net(), device="cpu", lowering="eager")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    model.layers[1].register_forward_hook(torch.compiler.disable(interrupt))
    with pytest.raises(KeyboardInterrupt):
        model(**data(0))
    assert terminal()[-1] == ""
