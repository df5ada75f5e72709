"""A plugin of pytest in the copied trees; the tool writes it there as `_faults_plugin`.

It selects tests and notes what happens, a JSON line each, in the file that an environment variable
names: other processes of a test note there too.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

import pytest

NOTES = "FAULTS_NOTES"  # the file for notes
SELECTED = "FAULTS_SELECTED"  # a file: the tests to run, one a line, in their order

_reached: set[tuple[str, str]] = set()


def note(what: str, test: str, **more: Any) -> None:
    if path := os.environ.get(NOTES):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        line = {"what": what, "test": test, **more}
        os.write(descriptor, (json.dumps(line) + "\n").encode())
        os.close(descriptor)


def reached(fault: str) -> None:
    """The probe: the running test has come to where `fault` would be."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (fault, test) not in _reached:
        with suppress(OSError):  # a test limits the size of files
            note("reached", test, fault=fault)
            _reached.add((fault, test))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (path := os.environ.get(SELECTED)):
        return
    with open(path) as lines:
        order = {line.rstrip("\n"): k for k, line in enumerate(lines)}
    chosen = [item for item in items if item.nodeid in order]
    config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
    items[:] = sorted(chosen, key=lambda item: order[item.nodeid])


def pytest_runtest_setup(item: pytest.Item) -> None:
    note("started", item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that was started, for all."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.failed or report.when == "call"):
        note(report.outcome, report.nodeid, time_s=round(report.duration, 4))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note("failed", report.nodeid)
