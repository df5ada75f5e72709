"""Ranks agree before a graph, and find who is to blame: ranks of one process, in threads.

With processes that are killed, stopped and interrupted: `tests/ranks/test_faults.py`.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore  # type: ignore[attr-defined]

from megacompile.errors import RankError
from megacompile.ir.collectives import Collectives
from megacompile.runtime.device import rank_notes, ranks
from megacompile.runtime.device.agreement import Agreement, _Flying
from megacompile.runtime.device.rank_notes import Faults, Limits, Note, Notes
from tests.ranks.here import error_of

FORWARD = Collectives("forward of Net", ("0ALL_GATHER of a", "1ALL_GATHER of b"), "digest f")
OTHER = Collectives("forward of Net", ("0ALL_GATHER of a", "2ALL_GATHER of c"), "digest o")
BACKWARD = Collectives("backward of Net", FORWARD.ops, "digest b")
LONG = Limits(60, 60)


# Who is to blame.


@dataclass
class Clock:
    """What `time.monotonic` says."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


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


def test_who_is_to_blame(clock: Clock) -> None:
    for name, (said, how, found) in CASES.items():
        options = {"waited_s": 1.0, "failed": False, **how}
        error = error_of(functools.partial(faults(said).look, "here", **options))
        message = error.removeprefix("RankError: ")
        assert bool(re.search(found, message)) if found else not error, f"{name}: {error}"


def test_a_rank_that_gives_no_sign_of_life(clock: Clock) -> None:
    """Unless it writes notes, or nobody has looked meanwhile."""
    for apart_s, beats, silent in ((1.0, False, True), (1.0, True, False), (10.0, False, False)):
        said: dict[str, Any] = {"n": 3, "beat": 1}
        seen = faults(said)

        def looks(
            seen: Faults = seen, said: Any = said, apart_s: float = apart_s, beats: bool = beats
        ) -> None:
            for _ in range(round(rank_notes.SILENT_S / apart_s) + 2):
                seen.look("here", 1.0, failed=False)
                clock.now += apart_s
                said["beat"] += beats

        assert error_of(looks).startswith("RankError: rank 0 waits in here for rank 1") == silent


# What they say of themselves.


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def pair(store: HashStore) -> Iterator[list[Agreement]]:
    """Two ranks, which meet."""
    made = [agreement(store, rank) for rank in range(2)]
    yield made
    for each in made:
        each.notes.end()


def agreement(store: Any, rank: int, *, meets: bool = True, **options: Any) -> Agreement:
    return Agreement((0, 1), rank, lambda: PrefixStore("x", store), LONG, meets=meets, **options)


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
    """One of them may have a graph without collectives, or a graph within another one: a hook in a
    graph reads a parameter, and the outer one goes on from where it was."""

    def nested(rank: Agreement) -> None:
        with rank.run(FORWARD):
            rank._at(1)
            with rank.run(BACKWARD):
                rank._at(2)
            assert rank.notes.position[1] == 1 and rank._op == FORWARD.at(0)

    nothing = Collectives("forward of Net", (), "digest n")
    assert each(pair, runs(FORWARD, BACKWARD), runs(FORWARD, nothing, BACKWARD)) == ["", ""]
    assert each(pair, nested, nested) == ["", ""]
    assert each(pair, *2 * [lambda rank: rank.meet("save()")]) == ["", ""]


def more_steps(rank: Agreement) -> None:
    rank.steps = 3
    runs(FORWARD)(rank)


DIFFERENT: dict[str, tuple[Callable[[Agreement], None], str]] = {
    "another collective": (runs(OTHER), "collective 2 is .*ALL_GATHER of . in rank . and "),
    "another graph": (runs(BACKWARD), "(forward|backward) of Net, whose first collective is 0ALL"),
    "more steps": (more_steps, "has made . steps .* and rank . [03]"),
    "one more graph before": (runs(FORWARD, BACKWARD, FORWARD), "forward of Net, rank . the ba"),
    "it raises": (raises, r"rank 1, which raised ValueError: bad stage, in 1ALL_GATHER of b"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_do_something_else_all_stop(name: str, pair: list[Agreement]) -> None:
    body, found = DIFFERENT[name]
    first, second = each(pair, runs(FORWARD, FORWARD, BACKWARD), body)
    both = [first] if name == "it raises" else [first, second]
    for error in both:
        assert error.startswith("RankError"), (first, second)
        with pytest.raises(RankError, match=found):
            raise RankError(error)
    again = each(pair, runs(FORWARD), runs(FORWARD))
    assert all(error.startswith("RankError") for error in again), "for good"


def test_what_one_rank_cannot_do_is_told_to_all(pair: list[Agreement]) -> None:
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda r: r.meet("save()", f"no {r.rank}" * r.rank), pair))
        assert found == [{1: "no 1"}] * 2
        assert list(threads.map(lambda rank: rank.meet("save()"), pair)) == [{}] * 2


def test_a_store_that_is_gone() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            pass

        def compare_set(self, *_: str) -> bytes:
            raise DistStoreError("gone")

    alone = Agreement((0, 1), 0, Gone, LONG, meets=True)
    with pytest.raises(RankError):
        runs(FORWARD)(alone)
    alone.notes.end()


def test_keys_of_graphs_that_are_over_go(pair: list[Agreement], store: HashStore) -> None:
    graphs = [FORWARD] * 70
    assert each(pair, runs(*graphs), runs(*graphs)) == ["", ""]
    pair[1]._watch()
    assert store.check(["x/0"]), "the first rank does that"
    pair[0]._watch()
    kept = [store.check([f"x/{n}"]) for n in range(70)]
    assert kept == [False] * 6 + [True] * 64


def test_notes(store: HashStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    used = Clock(0.0)
    monkeypatch.setattr(time, "process_time", used)
    first, second = (Notes((0, 1), rank, lambda: store) for rank in range(2))

    def idle_s() -> float:
        clock.now += 10
        first._beat()
        return second.others()[0].idle_s

    assert idle_s() == 10.0 and idle_s() == 20.0, "it uses no processor"
    used.now += 5
    assert idle_s() == 0.0 and idle_s() == 10.0
    first.working += 1
    assert idle_s() == 0.0, "it may only wait for its disk"
    first.position = (4, 2, "in a save")
    first.say(fault="raised it", by=0)
    note = second.of(0)
    assert note is not None and (note.n, note.entered, note.at) == (4, 2, "in a save")
    assert (note.fault, note.by, note.beat, note.pid) == ("raised it", 0, 5, os.getpid())
    assert second.runs(note) and not second.runs(Note(pid=2**22 + 1))
    assert second.runs(Note(pid=2**22 + 1, host="another")), "nobody can know"
    assert second.of(5) is None
    for notes in (first, second):
        notes.end()
    ended = second.of(0)
    assert ended is not None and ended.ended and not first.are_written


# The end of a process whose GPU waits for collectives, with events of our own.


def test_the_groups_of_a_mesh_end_at_once() -> None:
    """Each of two ends behind the other one's collectives."""
    both, over = threading.Barrier(2), list[int]()
    groups: Any = [SimpleNamespace(abort=lambda: over.append(both.wait(60))) for _ in range(2)]
    ranks.abort_at_once(groups)
    assert len(over) == 2


class Gpu:
    """A rank whose GPU is in a collective that others may never answer, and what has ended that."""

    def __init__(self, store: HashStore) -> None:
        self.aborted: list[bool] = []
        self.agreement = agreement(store, 0, meets=False, abort=lambda: self.aborted.append(True))
        self.notes, self.done = self.agreement.notes, threading.Event()
        event: Any = SimpleNamespace(query=self.done.is_set)
        self.agreement._flying.append(_Flying("0ALL_GATHER", event))


@pytest.fixture
def gpu(store: HashStore) -> Iterator[Gpu]:
    made = Gpu(store)
    yield made
    made.done.set()
    made.notes.end()


def test_a_process_ends_behind_its_collectives(gpu: Gpu) -> None:
    ends = threading.Thread(target=gpu.notes.end)
    ends.start()
    ends.join(0.3)
    assert ends.is_alive() and gpu.notes.are_written, "the thread would find who does not come"
    gpu.done.set()
    ends.join(60)
    assert not ends.is_alive() and not gpu.aborted


def test_a_fault_of_another_rank_ends_them(gpu: Gpu, store: HashStore) -> None:
    other = agreement(store, 1, meets=False)
    assert error_of(lambda: raises(other), Exception)
    gpu.agreement._watch()
    assert gpu.aborted == [True]
    with pytest.raises(RankError, match="rank 1, which raised ValueError: bad stage"):
        gpu.agreement.check()
    gpu.notes.end()
    assert gpu.aborted == [True], "they are over: nobody waits"
    other.notes.end()
