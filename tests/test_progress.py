"""One line on stderr says what the first step waits for; at the end it is gone."""

from __future__ import annotations

import io
import logging
import sys
import time
from typing import Any

import pytest
from torch import nn

from megacompile import log, megacompile, progress
from megacompile.progress import bar, line, now
from megacompile.runtime.model.program import Program
from tests.training import adamw, data, net


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest puts its own stderr there when a test begins."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def shown(file: io.StringIO) -> list[str]:
    """What the line said, one after the other, "" where it was gone."""
    return [text.partition("megacompile: ")[2] for text in file.getvalue().split("\r\x1b[K")[1:]]


def step(model: nn.Module, *, optimizers: list[Any]) -> None:
    model(**data(0)).backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("option", [None, True])
def test_the_first_step_says_what_it_waits_for(
    option: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in its turn, and the next step says nothing."""
    terminal = terminal_for(monkeypatch)
    model = net()
    megacompile(model, device="cpu", lowering="eager", progress=option)
    optimizers = adamw(model)
    step(model, optimizers=optimizers)
    said = shown(terminal)
    assert list(dict.fromkeys(text for text in said if text)) == [
        "capturing the model ...",
        "planning the step ...",
        "running the first step ...",
        "preparing the update ...",
    ]
    assert said[-1] == "" and not progress._lines
    terminal.truncate(0)
    terminal.seek(0)
    step(model, optimizers=optimizers)
    assert terminal.getvalue() == ""


def test_elsewhere_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for file, option in ((Terminal(), False), (io.StringIO(), None)):
        monkeypatch.setattr(sys, "stderr", file)
        model = net()
        megacompile(model, device="cpu", lowering="eager", progress=option)
        step(model, optimizers=adamw(model))
        assert "\r" not in file.getvalue()


def test_it_is_gone_when_the_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Program, "executor", fails)
    model = net()
    megacompile(model, device="cpu", lowering="eager")
    with pytest.raises(KeyboardInterrupt):
        model(**data(0))
    assert shown(terminal)[-1] == "" and not progress._lines


def test_a_bar_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with line("one", None), bar("two", 3, None) as advance:
        assert shown(terminal)[-1].startswith("two")
        assert shown(terminal)[0] == "one ..."
        advance(3)
    now("nothing")
    assert "nothing" not in terminal.getvalue()


def test_the_log_says_how_long_each_took(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown or not; of a line that is inside of another one the outer one's time goes on."""
    monkeypatch.setattr(time, "perf_counter", iter(range(100)).__next__)
    with caplog.at_level(logging.INFO, "megacompile.time"):
        with line("capturing", False):
            now("planning")
            with line("preparing", False):
                pass
            with bar("compiling", 3, False) as advance:
                advance(3)
            now("running")
    said = [record.getMessage().rpartition(" took ")[0] for record in caplog.records]
    assert said == ["capturing", "preparing", "planning", "compiling", "running"]


def test_what_took_no_time_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megacompile.time"):
        log.took("a short one", 0.009)
        log.took("a long one", 1.234)
    assert [record.getMessage() for record in caplog.records] == ["a long one took 1.23 s"]
