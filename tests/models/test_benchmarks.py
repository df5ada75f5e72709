"""The benchmarks of peers, plans and bottlenecks: processes that go wrong, turns, pages."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bottlenecks, plans
from benchmarks.peers import driver, page, process
from benchmarks.peers.__main__ import main
from benchmarks.peers.outcome import Outcome, Status
from benchmarks.peers.store import Results, load
from benchmarks.peers.summary import differing, figures, rows
from benchmarks.peers.work import Point, Setting

SMALL = Setting("3.9b", 16, 1024)
RUN = {
    **{"gpu": "NVIDIA H200", "cpus": "16", "host GiB": 125, "python": "3.11", "torch": "2.11"},
    **{"transformers": "5.0", "commit": "abc", "command": "python -m benchmarks.peers"},
}


def measured(step_s: float, loss: float = 12.0) -> Outcome:
    result = {
        "parameters": 10**9,
        "step_s": step_s,
        "losses": [loss, loss - 1],
        "host_bytes": 2**30,
        "gpu_bytes": 2**31,
    }
    return Outcome(Status.OK, result=result | {"first_step_s": 9.0}, package="a 1.0")


def test_what_becomes_of_a_process(tmp_path: Path) -> None:
    """It measures, takes too much memory, or is killed by the system."""

    def ended(code: str, **limits: float) -> Outcome:
        """Of a Python program; its last argument is the file of events."""
        tmp_path.joinpath(name := str(len([*tmp_path.iterdir()]))).mkdir()
        code = f"import json, os, sys, time\nevents = sys.argv[1]\n{code}"
        command = [sys.executable, "-c", code]
        return process.run(command, tmp_path / name, limit_s=60.0, **limits)  # type: ignore[arg-type]

    said = measured(0.5).as_json()
    outcome = ended(f"open(events, 'w').write(json.dumps({{'outcome': {said!r}}}))")
    assert outcome.status is Status.OK and outcome.result is not None
    assert outcome.result["step_s"] == 0.5 and outcome.process_s > 0
    outcome = ended("kept = bytearray(300 * 2**20)\ntime.sleep(600)", host_bytes=200 * 2**20)
    assert outcome.status is Status.OUT_OF_MEMORY and "of 0.2 at most" in outcome.reason
    outcome = ended("os.kill(os.getpid(), 9)")
    assert outcome.status is Status.OUT_OF_MEMORY and "killed by the system" in outcome.reason


# Points.


def go(
    results: Results,
    path: Path,
    outcomes: dict[str, Outcome],
    total_s: float = 1e6,
    each_s: float = 1,
) -> list[str]:
    """Measure what is planned; gives who was launched. A launch takes `each_s` of a clock."""
    launched: list[str] = []

    def launch(point: Point, limit_s: float) -> Outcome:
        launched.append(point.peer)
        return outcomes[point.peer]

    driver.go(
        *(results, path, launch),
        limit_s=100.0,
        total_s=total_s,
        say=lambda text: None,
        clock=lambda: each_s * len(launched),
    )
    return launched


def planned(settings: list[Setting], *peers: str, repeats: int = 2) -> Results:
    results = Results(runs=[RUN])
    results.plan(driver.points(settings, peers, repeats))
    return results


def test_what_failed_is_not_repeated_and_nothing_larger_is_tried(tmp_path: Path) -> None:
    large = replace(SMALL, batch=64)
    results = planned([SMALL, large, replace(SMALL, batch=4)], "compiled")
    outcomes = {"compiled": Outcome(Status.OUT_OF_MEMORY, "150 GiB")}
    assert len(go(results, tmp_path / "r.json", outcomes)) == 2, "not the repeats, and not 64"
    said = {row.setting.batch: row.failure for row in rows(results)}
    assert said[64] is not None and said[64].reason == "out of memory at 3.9b, 16x1024"


def test_a_run_that_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = planned([SMALL], "megacompile", "compiled")
    outcomes = {"megacompile": measured(1.0), "compiled": measured(2.0)}
    first = go(results, path, outcomes, total_s=30.0, each_s=10.0)
    assert first == ["megacompile", "compiled"], "15 s are not enough for another process"
    again = load(path)
    assert go(again, path, outcomes) == ["megacompile", "compiled"]
    assert len(load(path).records) == 4


# What is shown.


def test_what_the_table_shows() -> None:
    """Medians and reasons; other work is seen."""
    results = planned([SMALL], "megacompile", "compiled", "deepspeed")
    for k in range(2):
        results.add(Point(SMALL, "megacompile", k), measured(1.0 + k))
        results.add(Point(SMALL, "compiled", k), measured(4.0, 12.5))
    missing = Outcome(Status.NOT_INSTALLED, "no package deepspeed")
    results.add(Point(SMALL, "deepspeed", 0), missing)
    first, second, third = figures(rows(results)).splitlines()[2:]
    assert "| 1.500 | 1.000 .. 2.000 |" in first and "| 4.000 |" in second
    assert "not installed: no package deepspeed" in third
    assert "first loss" in differing(rows(results))[0]


def test_the_page_is_what_the_files_give() -> None:
    """Of the results that are in the repository."""
    assert page.main(["--check"]) == 0


@pytest.mark.thorough
def test_from_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "r.json"
    few = ["--device", "cpu", "--tokens", "2x16", "--repeats", "1", "--warm", "0", "--steps", "1"]
    peers = ["--peer", "plain", "megacompile", "roundpipe"]
    assert main([*few, *peers, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "tiny, 2x16, plain #1: ok" in text and "tiny, 2x16, megacompile #1: ok" in text
    assert "roundpipe #1: not installed" in text
    with pytest.raises(SystemExit):
        main([*few, "--out", str(out)])
    assert "is there already" in capsys.readouterr().err


def test_plans_that_are_longer_than_before() -> None:
    def found(now: Any, before: Any) -> list[str]:
        return plans.longer([{"case": "a", "step_s": now}], {"a": before})

    assert found(1.0049, 1.0) == found(2.0, None) == []
    assert found(1.0051, 1.0) == ["a: 1.005 s, was 1 s (+0.5%)"]
    assert found(None, 2.0) == ["a: does not fit; it took 2 s"]


def test_what_is_staged_is_what_is_predicted() -> None:
    """Of the situation that takes a moment to build; `--predict` shows all four."""
    (row,) = bottlenecks.main(["--predict", "--only", "activations offloaded"])
    assert (row["staged"], row["explain"], row["right"]) == ("d2h", "d2h", "yes")
