"""A plugin of pytest in the copied trees; the tool writes it there as `_faults_plugin`.

It selects tests and notes what happens, a JSON line each, in the file that an environment variable
names: other processes of a test note there too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

NOTES = "FAULTS_NOTES"  # the file for notes
SELECTED = "FAULTS_SELECTED"  # a file: the tests to run, one a line, in their order
FIXTURE = "FAULTS_FIXTURE"  # the fixture that is being made

_reached: set[tuple[str, str, str]] = set()


def note(**line: Any) -> None:
    path = os.environ.get(NOTES)
    if path:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.close(descriptor)


def reached(fault: str) -> None:
    """The probe: the running test has come to where `fault` would be."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    key = (fault, test, os.environ.get(FIXTURE, ""))
    if key not in _reached:
        with suppress(OSError):  # a test limits the size of files
            note(what="reached", fault=fault, test=test, fixture=key[2])
            _reached.add(key)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (path := os.environ.get(SELECTED)):
        return
    with open(path) as lines:
        order = {line.rstrip("\n"): k for k, line in enumerate(lines)}
    chosen = [item for item in items if item.nodeid in order]
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = sorted(chosen, key=lambda item: order[item.nodeid])


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """What a fixture of a wider scope reaches, each of its tests relies on."""
    outer = os.environ.get(FIXTURE)
    if fixturedef.scope != "function":
        os.environ[FIXTURE] = f"{fixturedef.baseid}|{fixturedef.argname}"
    yield
    if outer is None:
        os.environ.pop(FIXTURE, None)
    else:
        os.environ[FIXTURE] = outer


def pytest_runtest_logstart(nodeid: str) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or "PYTEST_XDIST_TESTRUNUID" not in os.environ:
        note(what="started", test=nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began = sum(os.times()[:4])  # of this process and its children that ended
    yield
    fixtures = list(getattr(item, "fixturenames", ()))
    time_s = sum(os.times()[:4]) - began
    note(what="ran", test=item.nodeid, time_s=round(time_s, 4), fixtures=fixtures)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    result: Any = yield
    report = result.get_result()
    if report.failed or (report.when == "call" and report.passed):
        note(what=report.outcome, test=item.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note(what="failed", test=report.nodeid)
