"""Ranks agree before a graph, and find who is to blame: ranks of one process, in threads.

With processes that are killed, stopped and interrupted: `tests/ranks/test_faults.py`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from megacompile.errors import RankError
from megacompile.ir.collectives import Collectives
from megacompile.runtime.device.agreement import Agreement
from megacompile.runtime.device.rank_notes import Faults, Limits, Note
from tests.ranks.here import error_of

FORWARD = Collectives("forward of Net", ("0ALL_GATHER of a", "1ALL_GATHER of b"), "digest f")
OTHER = Collectives("forward of Net", ("0ALL_GATHER of a", "2ALL_GATHER of c"), "digest o")
BACKWARD = Collectives("backward of Net", FORWARD.ops, "digest b")


BEHIND = {"n": 1, "at": "in the forward"}  # of this rank, which is in the third graph
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # what rank 1 says; how this rank waits; what is found: a pattern, or "" for nothing
    "it is there": ({"n": 3, "entered": 1}, {}, ""),
    "another one has raised": ({"fault": "raised it", "by": 2}, {}, "for rank 2, which raised it"),
    "they disagree": ({"fault": "graph 7: they differ", "by": -1}, {}, "^graph 7: they differ$"),
    "it has ended": ({**BEHIND, "ended": "SystemExit"}, {}, r"rank 1, which has ended \(SystemEx"),
    "it has ended later": ({"n": 9, "ended": "SystemExit"}, {}, ""),
    "it has ended and an op failed": ({"n": 9, "ended": "it"}, {"failed": True}, "has ended"),
    "it is idle": ({**BEHIND, "idle_s": 46.0}, {"waited_s": 46.0}, "has done nothing for 46 s"),
    "it is idle, and waits for us": (
        {"n": 3, "entered": 1, "idle_s": 46.0},
        {"waited_s": 46.0},
        "",
    ),
    "it was idle before": ({**BEHIND, "idle_s": 46.0}, {"waited_s": 44.0}, ""),
    "it works": ({**BEHIND, "idle_s": 1.0}, {"waited_s": 599.0}, ""),
    "it works for too long": ({**BEHIND, "idle_s": 1.0}, {"waited_s": 601.0}, "and works"),
    "it was killed": ({"pid": -1, "n": 3}, {}, r"rank 1, which was killed \(process -1\)"),
    "it never came": ({}, {"waited_s": 601.0}, "rank 1, which has not called megacompile"),
    "it may come": ({}, {"waited_s": 599.0}, ""),
}


def faults(said: dict[str, Any]) -> Faults:
    """What rank 0, in its third graph, knows of rank 1, and of rank 2 that is there."""
    beats = itertools.count()
    notes: Any = SimpleNamespace(
        ranks=(0, 1, 2),
        rank=0,
        position=(3, 1, "here"),
        others=lambda thread: {2: Note(next(beats), 3, 1)} | ({1: Note(**said)} if said else {}),
        runs=lambda note: note.pid > 0,
    )
    return Faults(notes, Limits(45.0, 600.0), thread=False)


def test_who_is_to_blame() -> None:
    for name, (said, how, found) in CASES.items():
        options = {"waited_s": 1.0, "failed": False, **how}
        error = error_of(functools.partial(faults(said).look, "here", **options))
        message = error.removeprefix("RankError: ")
        assert bool(re.search(found, message)) if found else not error, f"{name}: {error}"


@pytest.fixture
def pair() -> Iterator[list[Agreement]]:
    """Two ranks, which meet."""
    store = HashStore()
    made = [
        Agreement((0, 1), rank, lambda: PrefixStore("x", store), Limits(60, 60), meets=True)
        for rank in range(2)
    ]
    yield made
    for each in made:
        each.notes.end()


def each(pair: list[Agreement], *bodies: Callable[[Agreement], object]) -> list[str]:
    """The errors that two ranks end with, which do these at the same time."""

    def error(body: Callable[[Agreement], object], rank: Agreement) -> str:
        return error_of(lambda: body(rank), Exception)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(error, bodies, pair))


def runs(*graphs: Collectives) -> Callable[[Agreement], None]:
    def body(rank: Agreement) -> None:
        for graph in graphs:
            with rank.run(graph):
                rank._at(1)

    return body


def raises(rank: Agreement) -> None:
    with rank.run(FORWARD):
        rank._at(2)
        raise ValueError("bad stage")


def test_ranks_that_do_the_same_go_on(pair: list[Agreement]) -> None:
    """One of them may have a graph without collectives. What one cannot do is told to all."""
    nothing = Collectives("forward of Net", (), "digest n")
    assert each(pair, runs(FORWARD, BACKWARD), runs(FORWARD, nothing, BACKWARD)) == ["", ""]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda r: r.meet("save()", f"no {r.rank}" * r.rank), pair))
        assert found == [{1: "no 1"}] * 2
        assert list(threads.map(lambda rank: rank.meet("save()"), pair)) == [{}] * 2


def more_steps(rank: Agreement) -> None:
    rank.steps = 3
    runs(FORWARD)(rank)


DIFFERENT: dict[str, tuple[Callable[[Agreement], None], str]] = {
    "another collective": (runs(OTHER), "collective 2 is .*ALL_GATHER of . in rank . and "),
    "another graph": (runs(BACKWARD), "(forward|backward) of Net, whose first collective is 0ALL"),
    "more steps": (more_steps, "has made . steps .* and rank . [03]"),
    "one more graph before": (
        runs(FORWARD, BACKWARD, FORWARD),
        "forward of Net, rank . the ba|backward of Net, rank . the fo",  # of who finds it
    ),
    "it raises": (raises, r"rank 1, which raised ValueError: bad stage, in 1ALL_GATHER of b"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_do_something_else_all_stop(name: str, pair: list[Agreement]) -> None:
    body, found = DIFFERENT[name]
    first, second = each(pair, runs(FORWARD, FORWARD, BACKWARD), body)
    both = [first] if name == "it raises" else [first, second]
    for error in both:
        assert error.startswith(RankError.__name__) and re.search(found, error), (first, second)
    again = each(pair, runs(FORWARD), runs(FORWARD))
    assert all(error.startswith("RankError") for error in again), "for good"
