"""One line on stderr says what the first step waits for; at the end it is gone."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import log, megacompile, progress
from megacompile.cost import rates
from megacompile.cost.disk import DiskRates
from megacompile.cost.hardware import H200, Hardware
from megacompile.progress import bar, line, now, phase
from megacompile.runtime.device import host_budget
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.buffers_ahead import Wanted
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.model.program import Program
from tests import inside
from tests.test_resident import want
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


def said(file: io.StringIO) -> list[str]:
    """The same without what is gone, and without what was said a moment before."""
    texts = [text for text in shown(file) if text]
    return [text for i, text in enumerate(texts) if not i or texts[i - 1] != text]


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
    assert list(dict.fromkeys(said(terminal))) == [
        "capturing the model ...",
        "planning the step ...",
        "running the first step ...",
        "running the first backward ...",
        "making host memory ...",
        "preparing the update ...",
    ]
    assert shown(terminal)[-1] == "" and not progress._lines
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


def test_off_a_terminal_a_long_wait_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is waited for at that moment."""
    monkeypatch.setattr(progress, "_LONG_S", 0.05)
    monkeypatch.setattr(progress, "_said_off_terminals", False)
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())

    with line("one", False):  # progress=False
        time.sleep(0.2)
    with line("one", None):
        pass  # too short
    with line("", None):  # nothing is waited for
        time.sleep(0.2)
    assert file.getvalue() == ""
    with line("one", None), phase("two"):
        until_s = time.monotonic() + 10
        while not file.getvalue() and time.monotonic() < until_s:
            time.sleep(0.01)
    first = file.getvalue()
    assert first.startswith("megacompile: two ... (the first step may take minutes; said once;")
    assert first.count("\n") == 1
    with line("three", None):
        time.sleep(0.2)
    assert file.getvalue() == first


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


def test_a_phase_is_said_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)
    with phase("without a line"):
        pass
    assert terminal.getvalue() == ""
    with line("one", None):
        with phase("two"), phase("three"):
            pass
        with line("four", None):
            pass
        with line("", None), phase("five"):
            pass
    assert shown(terminal) == [
        *("one ...", "two ...", "three ...", "two ...", "one ..."),
        *("four ...", "", "one ..."),
        *("five ...", "", "one ..."),
        "",
    ]


def test_the_line_is_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_for(monkeypatch)

    def beside() -> None:
        now("another")
        with phase("a phase"):
            pass

    with line("one", None):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert shown(terminal) == ["one ...", ""]


def test_phases_of_one_name_are_logged_as_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", iter(range(100)).__next__)
    with caplog.at_level(logging.INFO, "megacompile.time"), line("running", False):
        for _ in range(3):
            with phase("making"):
                pass
    took = [record.getMessage() for record in caplog.records]
    assert took == ["running took 7.00 s", "making took 3.00 s"]


def test_buckets_that_move_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call begins again then, and its line goes on."""
    terminal = terminal_for(monkeypatch)
    model = megacompile(net(), device="cpu", lowering="eager", gpu_memory="1MiB")
    assert not inside.residents(model)
    model(**data(0))
    assert inside.residents(model)
    texts = said(terminal)
    moved = texts.index("moving parameters to the device ...")
    assert texts[:moved] == ["capturing the model ...", "planning the step ..."]
    assert {"planning the step ...", "running the first step ..."} <= set(texts[moved:])


def test_buckets_that_move_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile(net(), device="cpu", lowering="eager")
    optimizers = adamw(model)
    step(model, optimizers=optimizers)
    terminal = terminal_for(monkeypatch)
    for names, where in ((("embed", "layers.0"), "device"), ((), "host")):
        want(model, *names)
        step(model, optimizers=optimizers)
        assert inside.residents(model) == set(names)
        assert said(terminal)[0] == f"moving parameters to the {where} ..."
        terminal.truncate(0)
        terminal.seek(0)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("to", ["host", "disk", "device"])
def test_states_that_were_loaded(
    to: str, in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizers=[optimizer])
    optimizer.zero_grad()
    terminal = terminal_for(monkeypatch)
    options: dict[str, Any] = {"optimizer": optimizer} if in_backward else {}
    options |= {"disk": tmp_path} if to == "disk" else {}
    options |= {"resident": "all"} if to == "device" else {}
    megacompile(model, device="cpu", lowering="eager", **options)
    step(model, optimizers=[optimizer])
    moves = to != "device" or in_backward  # else torch.optim's own step takes them along
    assert (f"moving optimizer states to the {to} ..." in said(terminal)) is moves
    terminal.truncate(0)
    step(model, optimizers=[optimizer])
    assert "moving" not in terminal.getvalue()


def test_code_that_only_the_backward_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward took the loss for what has a gradient."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.layer(x)
            return y.sum(), y

    terminal = terminal_for(monkeypatch)
    model = megacompile(Two(), device="cpu", lowering="eager")
    _, y = model(torch.ones(2, 8))
    terminal.truncate(0)
    y.sum().backward()
    assert said(terminal)[:2] == ["running the first backward ...", "planning the step ..."]


def test_host_memory_that_is_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for it waits."""
    budget, began, may = HostBudget(), threading.Event(), threading.Event()
    real = HostBuffer

    def slow(*args: Any, **kwargs: Any) -> Any:
        began.set()
        assert may.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(host_budget, "HostBuffer", slow)
    budget.make_ahead([Wanted(4096, pin=False)], "tests", torch.device("cpu"))
    assert began.wait(60)
    terminal = terminal_for(monkeypatch)
    timer = threading.Timer(0.05, may.set)
    timer.start()
    with line("one", None):
        assert budget.ready(4096, pin=False) is not None
    timer.join()
    assert shown(terminal) == ["one ...", "making host memory ...", "one ...", ""]


def test_rates_that_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    terminal = terminal_for(monkeypatch)
    texts = []

    def measure(device: object, **_: object) -> Hardware:
        texts.append(said(terminal)[-1])
        return H200

    def measure_disk(folder: object) -> DiskRates:
        texts.append(said(terminal)[-1])
        return DiskRates(1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(rates, "measure", measure)
    monkeypatch.setattr(rates, "measure_disk", measure_disk)
    monkeypatch.setattr(rates, "_file_of_rank", lambda *_: tmp_path / "of a rank")
    with line("planning the step", None):
        for _ in range(2):  # then they are on file
            rates.load("cpu")
            rates.load_disk(tmp_path)
        rates.measure_of_rank(torch.device("cpu"), 2, meet=lambda: None)
    machine = "measuring the machine's rates ..."
    assert texts == [machine, "measuring the disk's rates ...", machine]


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
    took = [record.getMessage().rpartition(" took ")[0] for record in caplog.records]
    assert took == ["capturing", "preparing", "planning", "compiling", "running"]


def test_what_took_no_time_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megacompile.time"):
        log.took("a short one", 0.009)
        log.took("a long one", 1.234)
    assert [record.getMessage() for record in caplog.records] == ["a long one took 1.23 s"]
