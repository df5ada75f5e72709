"""What `plan` says of page-locked memory, of a disk, and of what passes through the host."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
from torch import Tensor, nn

from megacompile import api, megacompile
from megacompile.cli import main, plan
from megacompile.cost.hardware import H200
from megacompile.cost.pageable import SHORT
from megacompile.errors import HostMemoryError
from megacompile.plan import explanation, planner, searches
from megacompile.plan.compiler import PassCompiler
from megacompile.plan.planner import SearchResult
from megacompile.plan.problem import Problem
from megacompile.text import format_bytes

KIB, MIB, GIB = 2**10, 2**20, 2**30
WIDTH, LAYERS = 64, 6
SMALL = ("--batch", "2", "--seq", "16", "--gpu", "4090")
TOWER = "tests.test_plan_budgets:tower"


class Words(nn.Module):
    """Layers of 64 KiB, and their loss."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(LAYERS)
            )
        )
        self.adapter = nn.Linear(WIDTH, WIDTH)
        if frozen:
            self.layers.requires_grad_(False)
            self.embedding.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.adapter(self.layers(self.embedding(tokens))).square().mean()
        return result


def tower() -> nn.Module:
    return Words()


def frozen() -> nn.Module:
    return Words(frozen=True)


def answer(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The rows of a table: by the first cell, the others."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for line in lines if (cells := _cells(line))}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket lives on the device, though all of them would fit."""

    def streamed_search(problem: Problem, **options: Any) -> SearchResult | None:
        return planner.search(problem, **{**options, "resident": False})

    monkeypatch.setattr(searches, "search", streamed_search)


SLOW = ("--host-memory", "64MiB", "--link", "0.01")


@pytest.mark.usefixtures("streamed")
def test_page_locked_memory_is_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Needed, available, what stays pageable, its price, and what more would buy."""
    argv = (TOWER, *SMALL, *SLOW)
    free, short, none, enough = (
        answer(capsys, *argv, *flags)["plan"]
        for flags in (
            (),
            ("--page-locked", "1MiB"),
            ("--page-locked", "0"),
            ("--page-locked", "63.9MiB"),
        )
    )
    needed = short["host"]["needed_bytes"]
    assert free["page_locked"] is None and needed > 2 * MIB
    assert short["page_locked"]["needed_bytes"] == needed
    assert short["page_locked"]["there_bytes"] == MIB and short["page_locked"]["fits"] is False
    assert free["step_s"] == enough["step_s"] < short["step_s"] < none["step_s"]
    assert short["pageable_s"] == pytest.approx(short["step_s"] - free["step_s"])
    assert enough["pageable_s"] == free["pageable_s"] == 0.0
    names = [change["name"].split(" (")[0] for change in short["budgets"]]
    assert names == ["device memory", "host memory", "page-locked memory"]
    for each in (short, none):
        change = each["budgets"][2]
        assert each["step_s"] > change["step_s"] > each["step_s"] - each["pageable_s"]
        assert change["gain"] == pytest.approx(each["step_s"] / change["step_s"] - 1)
    assert len(enough["budgets"]) == 2
    assert enough["page_locked"]["fits"] is True


@pytest.mark.usefixtures("streamed")
def test_page_locked_memory_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, TOWER, *SMALL, *SLOW, "--page-locked", "1MiB")
    table = rows(out, "memory  ")
    assert table["memory"] == ["device", "host", "page-locked"]
    assert table["needed"][2] == table["needed"][1]
    assert table["available"] == ["22.3 GiB", "64 MiB", "1 MiB"]
    assert len(table["stay pageable"]) == len(table["which costs a step"]) == 1
    flat = " ".join(out.split())
    short = f"page-locked memory: {table['needed'][1]} needed, 1 MiB available: "
    assert flat.count(short + f"{table['stay pageable'][0]} stay pageable, and copies") == 1
    assert out.count("page-locked memory (+") == 1
    enough = printed(capsys, TOWER, *SMALL, *SLOW, "--page-locked", "0.9")
    assert "pageable" not in enough and rows(enough, "memory  ")["available"][2] == "57.6 MiB"
    assert "page-locked" not in printed(capsys, TOWER, *SMALL, *SLOW)


def test_the_last_graph_speaks_of_page_locked_memory_for_all() -> None:
    first, last = (
        f"{SHORT}{needed} MiB needed, 1 MiB available: copies are slower" for needed in (2, 3)
    )
    assert set(explanation._reasons([[first, "kept"], [last, "kept"]])) == {"kept", last}
    assert set(explanation._reasons([[last], ["kept", last]])) == {"graph 2: kept", last}


def test_of_several_graphs_it_says_which() -> None:
    found = explanation._reasons([["all", "a"], ["all", "b"], ["b", "all"]])
    assert found == ("all", "graph 1: a", "graphs 2, 3: b")
    assert explanation._reasons([["a", "b"]]) == ("a", "b")


def test_ranks_share_what_can_be_locked() -> None:
    assert H200.replace(locked_bytes=4 * MIB).shared_by(2).locked_bytes == 2 * MIB
    assert H200.shared_by(2).locked_bytes is None


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("much", "--page-locked much: needed a size such as 20GiB, or a fraction such as 0.5"),
        ("1.5", "--page-locked 1.5: needed a size such as 20GiB"),
        ("0GiB", "--page-locked 0GiB: needed a size such as 20GiB"),
        ("-1GiB", "--page-locked -1GiB: needed a size such as 20GiB"),
        ("0.5", "--page-locked 0.5: of what? give a size: 1GiB"),
    ],
)
def test_sizes_that_are_refused(capsys: pytest.CaptureFixture[str], size: str, words: str) -> None:
    assert main(["plan", TOWER, *SMALL, f"--page-locked={size}"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_fraction_is_of_host_memory() -> None:
    parser = argparse.ArgumentParser()
    plan.arguments(parser)
    args = parser.parse_args([TOWER, "--page-locked", "0.5", "--host-memory", "8GiB"])
    plan.check(args)
    assert plan.page_locked(args, 100 * GIB) == 4 * GIB
    args = parser.parse_args([TOWER, "--page-locked", "0.5"])
    assert plan.page_locked(args, 100 * GIB) == 50 * GIB


DISK = ("--disk", "/absent/scratch", "--disk-rates", "0.1/0.1", "--update-in-backward")


@pytest.mark.usefixtures("streamed")
def test_more_of_the_disk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth more of it is tried where something lies there, and its plan has it. The other
    plans have the disk that this one has."""
    made: list[PassCompiler] = []
    other = PassCompiler.other

    def noted(self: PassCompiler, *args: Any, **given: Any) -> PassCompiler:
        made.append(other(self, *args, **given))
        return made[-1]

    monkeypatch.setattr(PassCompiler, "other", noted)
    argv = (TOWER, *SMALL, *DISK, "--disk-memory", "16MiB")
    used = answer(capsys, *argv, "--host-memory", "2000KiB")["plan"]
    assert used["disk"]["needed_bytes"] and used["disk"]["there_bytes"] == 16 * MIB
    names = [change["name"] for change in used["budgets"]]
    assert names[2:] == ["disk memory (+1.6 MiB)", "rate of the disk"]
    disks = [each.chooser.disk_budget_bytes() for each in made]
    assert disks == [16 * MIB, 16 * MIB, 16 * MIB * 11 // 10]
    unused = answer(capsys, *argv, "--host-memory", "1GiB")["plan"]
    assert not unused["disk"]["needed_bytes"]
    assert not any("disk" in change["name"] for change in unused["budgets"])


FROZEN = "tests.test_plan_budgets:frozen"


def refused(monkeypatch: pytest.MonkeyPatch, limit: str, **options: Any) -> str:
    """What `megacompile()` says, where the device has memory for all gradients."""
    monkeypatch.setattr(api, "_device_bytes", lambda options: GIB)
    with pytest.raises(HostMemoryError) as error:
        megacompile(frozen().to("meta"), device="cpu", host_memory=limit, **options)
    return str(error.value)


def test_parameters_pass_through_the_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen base of 790 KiB fits on the device, and gets there by way of the host: `plan` and
    `megacompile()` refuse what is smaller with the same words."""
    argv = (FROZEN, *SMALL, "--host-memory")
    found = answer(capsys, *argv, "500KiB", code=1)
    assert found["plan"]["host"]["fits"] and found["plan"]["device"]["fits"] and not found["tried"]
    words, why = refused(monkeypatch, "500KiB").splitlines(), found["why_not"]
    assert words[0] == f"megacompile(): {why[0]}" == "megacompile(): host memory is too small"
    assert words[1:] == why[1 : len(words)]
    assert "parameters to move to the host" in words[1]
    disk, more = why[len(words) :]
    assert disk.startswith("with disk= it would fit: ")
    assert more.endswith(" more of host memory it would fit")
    assert main(["plan", *argv, "500KiB"]) == 1
    assert "it does NOT fit: host memory is too small\n" in capsys.readouterr().out


def test_so_much_more_does(capsys: pytest.CaptureFixture[str]) -> None:
    """It is the smallest change, to a kibibyte."""
    sizes = [4 * p.numel() for p in frozen().parameters()]
    least = -(-(sum(sizes) + max(sizes)) // KIB)
    argv = (FROZEN, *SMALL, "--host-memory")
    assert answer(capsys, *argv, f"{least}KiB")["fits"]
    assert not answer(capsys, *argv, f"{least - 1}KiB", code=1)["fits"]


def test_where_parameters_lie_on_a_disk_they_need_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = (*DISK[:4], "--disk-memory", "16MiB")
    argv = (FROZEN, *SMALL, "--host-memory", "500KiB", *disk)
    assert answer(capsys, *argv)["fits"]
    assert answer(capsys, *argv, "--disk-weights")["fits"]


def test_what_the_plan_lacks_is_in_the_smallest_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Parameters are too many for the host at first, and gradients and states behind that."""
    argv = (TOWER, *SMALL, "--gpu-memory", "1MiB", "--host-memory")
    why = answer(capsys, *argv, "500KiB", code=1)
    (more,) = (line for line in why["why_not"] if " more of host memory" in line)
    assert why["why_not"][0] == "host memory is too small"
    needed = why["plan"]["host"]["needed_bytes"]
    assert needed > 2 * MIB
    assert more == f"with {format_bytes(needed - 500 * KIB)} more of host memory it would fit"
