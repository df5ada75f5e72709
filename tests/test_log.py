"""Logging by subject, and MEGACOMPILE_LOG."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from megacompile import log, megacompile, schedules
from megacompile.errors import OptionError
from megacompile.ir.schedule import VIEWS
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


# --- the variable


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("", {}),
        ("schedule", {"schedule": logging.INFO}),
        ("schedule,plan", {"schedule": logging.INFO, "plan": logging.INFO}),
        (" +passes , plan ", {"passes": logging.DEBUG, "plan": logging.INFO}),
        ("all", dict.fromkeys(log.SUBJECTS, logging.INFO)),
        ("+all", dict.fromkeys(log.SUBJECTS, logging.DEBUG)),
        ("all,+plan", {**dict.fromkeys(log.SUBJECTS, logging.INFO), "plan": logging.DEBUG}),
        ("schedule,", {"schedule": logging.INFO}),
    ],
)
def test_the_variable_sets_levels(
    value: str, wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(log.VARIABLE, value)
    log.configure()
    assert levels() == wanted


@pytest.mark.parametrize("value", ["plans", "schedule,plans", "+", "-plan", "schedule;plan"])
def test_an_unknown_name_lists_those_that_there_are(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(log.VARIABLE, value)
    with pytest.raises(OptionError) as caught:
        megacompile(torch.nn.Linear(2, 2), device="cpu")
    text = str(caught.value)
    assert f"MEGACOMPILE_LOG={value}" in text
    assert all(subject in text for subject in log.SUBJECTS)
    assert "all, help" in text


def test_help_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(log.VARIABLE, "help")
    for _ in range(2):
        megacompile(torch.nn.Linear(2, 2), device="cpu")
    printed = capsys.readouterr().err
    assert printed == log.help_text() + "\n"
    for subject, text in log.SUBJECTS.items():
        assert f"{subject} " in printed and text in printed
    assert levels() == {}


def test_without_the_variable_nothing_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    root = logging.getLogger("megacompile")
    assert root.handlers == []
    assert root.propagate
    assert levels() == {}
    assert capsys.readouterr().err == ""


PRINTED = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(name)s")
for name in sys.argv[1:]:
    logging.getLogger(name).setLevel(logging.INFO)
from megacompile import megacompile
model = megacompile(torch.nn.Linear(2, 2), device="cpu", lowering="eager", progress=False)
model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.parametrize("asked", [[], ["megacompile.plan"]])
def test_a_script_that_logs_sees_what_it_asks_for(asked: list[str]) -> None:
    """`logging.basicConfig(level=logging.INFO)` alone asks for nothing of ours."""
    command = [sys.executable, "-c", PRINTED, *asked]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    names = {line for line in ran.stderr.splitlines() if line.startswith("megacompile")}
    assert names == set(asked)


def test_the_variable_leaves_levels_that_it_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    log.logger("memory").setLevel(logging.DEBUG)
    monkeypatch.setenv(log.VARIABLE, "plan")
    log.configure()
    monkeypatch.setenv(log.VARIABLE, "")
    log.configure()
    assert levels() == {"memory": logging.DEBUG}
    log.logger("memory").setLevel(logging.NOTSET)


def test_the_handler_goes_when_the_variable_does(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger("megacompile")
    for value in ("plan", "schedule", "all"):
        monkeypatch.setenv(log.VARIABLE, value)
        log.configure()
        assert len(root.handlers) == 1
    monkeypatch.setenv(log.VARIABLE, "")
    log.configure()
    assert root.handlers == []
    assert root.propagate


def test_what_is_asked_for_is_printed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(log.VARIABLE, "schedule,plan")
    model = train()
    printed = capsys.readouterr().err
    (schedule,) = schedules(model)
    assert schedule.table() in printed
    assert schedule.code() not in printed, "that is DEBUG"
    assert "megacompile.plan INFO: Stack: keeps saved tensors of stages: 4" in printed
    subjects = {line.split()[2] for line in printed.splitlines() if " megacompile." in line}
    assert subjects == {"megacompile.schedule", "megacompile.plan"}


# --- what is said


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
        line = f"{record.name} {record.time_s * 1e3:.1f} ms, {nodes} -> {record.nodes} nodes"
        assert f"Stack: {line}" in messages(caplog, "passes")
        nodes = record.nodes
    (prefetch,) = [record for record in schedule.history if record.name == "prefetch"]
    assert f"after prefetch:\n{prefetch.after}" in messages(caplog, "passes")
    assert schedule.code() in messages(caplog, "schedule")
    assert any(text.endswith("host buckets") for text in messages(caplog, "memory"))
    assert messages(caplog, "update") == [
        f"{bucket.name}: torch.optim" for bucket in schedule.buckets
    ]
    (captured,) = messages(caplog, "capture")
    assert captured.endswith(f"{len(schedule.stages)} stages")


def test_texts_are_made_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:

    def refused(*args: object) -> str:
        raise AssertionError("printed for nobody")

    monkeypatch.setitem(VIEWS, "table", refused)
    monkeypatch.setitem(VIEWS, "code", refused)
    train()
    assert str(log.Lazy(lambda: 5)) == "5"
