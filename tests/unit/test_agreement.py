"""What ranks agree on, and who is to blame: ranks of one process, in threads.

Graphs: with processes that are killed, stopped and interrupted, `tests/ranks/test_torchrun.py`.
Rates of GPUs that they measure, and of disks: with two processes, and who is slow,
`tests/ranks/refusals.py` and `tests/messages/test_ranks.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from megacompile.cost import rank_rates
from megacompile.cost.hardware import H200, Hardware
from megacompile.errors import RankError
from megacompile.ir.edges import Collectives
from megacompile.runtime.device.agreement import Agreement, Note, Wait
from megacompile.runtime.device.ranks import Ranks
from tests.processes import group_of_one
from tests.ranks.here import error_of
from tests.ranks.interconnect import Interconnect

FORWARD = Collectives("forward of Net", ("0ALL_GATHER of a", "1ALL_GATHER of b"), "digest f")
BACKWARD = Collectives("backward of Net", FORWARD.ops, "digest b")


BEHIND = {"n": 1, "at": "in the forward"}  # of this rank, which is in the third graph
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # what rank 1 says; how this rank waits; what is found: a pattern, or "" for nothing
    "it is there": ({"n": 3, "entered": 1}, {}, ""),
    "another one has raised": ({"fault": [2, "raised it"]}, {}, "for rank 2, which raised it"),
    "they disagree": ({"fault": [-1, "graph 7: they differ"]}, {}, "^graph 7: they differ$"),
    "it has ended": ({**BEHIND, "ended": "KeyError"}, {}, r"rank 1, which has ended \(KeyErr"),
    "it has ended later": ({"n": 9, "ended": "its script ended"}, {}, ""),
    "it has ended in the same collective": ({"n": 3, "entered": 1, "ended": "it"}, {}, ""),
    "it has ended and an op failed": ({"n": 9, "ended": "it"}, {"failed": True}, "has ended"),
    "it works": (BEHIND, {"waited_s": 599.0}, ""),
    "it works for too long": (BEHIND, {"waited_s": 601.0}, "has not arrived in 601 s: it is in"),
    "it is silent": ({**BEHIND, "silent": True}, {"waited_s": 31.0}, "sent no sign of life for 30"),
    "it was silent for less": ({**BEHIND, "silent": True}, {"waited_s": 29.0}, ""),
    "all were stopped": ({**BEHIND, "silent": True}, {"waited_s": 31.0, "looks": 1}, ""),
    "it never came": ({}, {"waited_s": 601.0}, "rank 1, which has not called megacompile"),
    "it may come": ({}, {"waited_s": 599.0}, ""),
}


def waits(
    said: dict[str, Any],
    patch: pytest.MonkeyPatch,
    *,
    waited_s: float = 1.0,
    failed: bool = False,
    looks: int = 100,
) -> None:
    """Rank 0, in its third graph, waits for rank 1, and for rank 2 that is there."""
    store = HashStore()
    silent, now_s = said.pop("silent", False), 1000.0
    patch.setattr(time, "monotonic", lambda: now_s)
    wait = Wait((0, 1, 2), 0, store, 600.0)
    if "fault" in said:
        store.set("fault", json.dumps(said.pop("fault")))
    for beat in range(looks + 1):
        now_s += waited_s / looks * bool(beat)
        for rank, note in {2: {"n": 3, "entered": 1}, **({1: said} if said else {})}.items():
            kept = beat if rank == 2 or not silent else 0
            store.set(f"note/{rank}", json.dumps(Note(**note, beat=kept)))
        wait.look("here", (3, 1), failed=failed)


@pytest.mark.parametrize("name", CASES)
def test_who_is_to_blame(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, how, found = CASES[name]
    error = error_of(lambda: waits(dict(said), monkeypatch, **how))
    message = error.removeprefix("RankError: ")
    assert bool(re.search(found, message)) if found else not error, error


@pytest.fixture
def pair() -> Iterator[list[Agreement]]:
    """Two ranks, which meet."""
    store = HashStore()
    made = [
        Agreement((0, 1), rank, lambda: PrefixStore("x", store), 60, meets=True)
        for rank in range(2)
    ]
    yield made
    for each in made:
        each.end()


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


def test_ranks_that_have_made_other_numbers_of_steps_all_stop(pair: list[Agreement]) -> None:
    """For good. Other differences: `tests/ranks/faults.py`."""
    for error in each(pair, runs(FORWARD, FORWARD, BACKWARD), more_steps):
        assert error.startswith(RankError.__name__), error
        assert re.search("after [03] optimizer steps, rank . the forward of Net after [03];", error)
    again = each(pair, runs(FORWARD), runs(FORWARD))
    assert all(error.startswith("RankError") for error in again)


CUDA = torch.device("cuda")


class Threads:
    """Ranks in threads, each with its own host name, and their collectives."""

    def __init__(self, hosts: str, patch: pytest.MonkeyPatch) -> None:
        self.hosts = hosts
        self.ranks = Interconnect(len(hosts))
        self.mesh: Any = SimpleNamespace(
            size=lambda: self.hosts.count(self.host()), get_rank=lambda: self.rank, ndim=1
        )
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        patch.delenv("GROUP_RANK", raising=False)
        patch.setattr(platform, "node", self.host)

    @property
    def rank(self) -> int:
        return self.ranks.current

    def host(self) -> str:
        return self.hosts[self.rank]

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.ranks.exchange(self.rank, "what each says", value)

    def each(self, body: Callable[[int], Any]) -> Any:
        """What each rank finds: the same."""
        bodies = [functools.partial(body, rank) for rank in range(len(self.hosts))]
        first, *others = self.ranks.run(bodies, seed=0)
        assert others == [first] * len(others)
        return first

    def agree(self, machines: list[Hardware | None], **options: Any) -> tuple[Any, list[int]]:
        """The agreed rates of ranks with GPUs, and the ranks that measured, with their number."""
        measured: list[int] = []

        def measure(device: torch.device, here: int, meet: Callable[[], object]) -> Hardware:
            measured.append(here)
            meet()
            return machines[self.rank] or SMALL

        options |= {
            "saved": lambda device, here: machines[self.rank],
            "measure": measure,
            "gathers": lambda *_: (395.0, 1e-5),
            "sums": lambda *_: 7.0,
        }
        found = self.each(
            lambda rank: rank_rates.agree(self.mesh, CUDA, self.all_gather_object, **options)
        )
        return found, measured


SMALL = H200.replace(host_memory_gb_s=50.0, update_gb_s=30.0, host_bytes=3 * 2**30)
LARGE = H200.replace(host_memory_gb_s=70.0, update_gb_s=40.0, host_bytes=9 * 2**30)
SLOWER = H200.replace(matmul_tflop_s=400.0, sustained=1.0, host_memory_gb_s=80.0, copy_s=9e-6)


def test_ranks_measure_together_where_one_of_them_has_no_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks share a host; the third has its own."""
    threads = Threads("aab", monkeypatch)
    found, measured = threads.agree([None, LARGE, SLOWER])
    assert sorted(measured) == [1, 2, 2], "as many as measure there at once"
    slowest = found
    assert slowest.matmul_tflop_s * slowest.sustained == pytest.approx(400.0)
    assert slowest.host_memory_gb_s == 60.0, "half of both at once"
    assert slowest.copy_s == 9e-6
    assert slowest.update_gb_s == 30.0, "a rank's own, which the other one's were in the way of"
    assert slowest.host_bytes == 3 * 2**30 // 2, "of two ranks"
    assert (slowest.interconnect_gb_s, slowest.collective_s) == (395.0, 1e-5)
    assert slowest.network_gb_s == 7.0 and slowest.name == H200.name
    rates: Any = SimpleNamespace(on=lambda machine: machine.replace(**DISK))
    disk = rank_rates.SharedDisk(2, 500, rates)
    found, measured = threads.agree([SMALL, LARGE, SLOWER], disk=disk)
    assert measured == [], "all have rates"
    assert found.disk_read_gb_s == 4.5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    found, _ = threads.agree([SMALL, LARGE, SLOWER])
    assert found.host_bytes == 2**30, "of three ranks, as torchrun says"
    alone, _ = Threads("a", monkeypatch).agree([H200])
    assert alone.interconnect_gb_s == H200.interconnect_gb_s, "nobody to gather from"


def test_ranks_share_the_cores_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two nodes with two ranks each: on all cores, or each on those of a node."""
    threads = Threads("aabb", monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def shares(*cores: range) -> Any:
        def body(rank: int) -> Any:
            mine = frozenset(cores[rank])
            share = rank_rates.share_of_cores(threads.mesh, threads.all_gather_object, mine)
            return threads.all_gather_object(share)

        return threads.each(body)

    every, near, far = range(16), range(8), range(8, 16)
    assert shares(*[every] * 4) == [8] * 4
    assert shares(near, far, near, near) == [8, 8, 4, 4]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # two of each host have another model
    assert shares(near, far, every, every) == [4, 4, 4, 4]


RATES = ("disk_read_gb_s", "disk_write_gb_s", "disk_read_both_gb_s", "disk_write_both_gb_s")
DISK = dict(zip(RATES, (9.0, 6.0, 6.0, 3.0), strict=True))


def test_a_disk_is_measured_by_one_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three ranks of a host with a disk of 1000 bytes, and one of another."""
    threads, measured = Threads("aaab", monkeypatch), list[int]()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))

    def load(folder: str) -> Any:
        measured.append(threads.rank)
        return threads.host()

    def agree(users: str, *, is_measured: bool = True) -> Any:
        def body(rank: int) -> Any:
            folder = str(tmp_path) if str(rank) in users else None
            options: dict[str, Any] = {"measured": is_measured, "load": load}
            mine = rank_rates.agree_disk(threads.mesh, folder, threads.all_gather_object, **options)
            each = None if mine is None else (mine.ranks, mine.share_bytes, mine.rates)
            return threads.all_gather_object(each)

        return threads.each(body)

    assert agree("0123") == [*[(3, 333, "a")] * 3, (1, 1000, "b")]
    assert sorted(measured) == [0, 3]
    assert agree("12", is_measured=False) == [None, *[(2, 500, None)] * 2, None]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")  # two have another model
    assert agree("12") == [None, *[(4, 250, "a")] * 2, None]


def test_meshes_of_other_shapes_have_groups_of_their_own() -> None:
    """Of the same ranks; and a mean is over the ranks that replicate."""
    with group_of_one():
        meshes = [init_device_mesh("cpu", sizes) for sizes in ((1,), (1, 1))]
        flat, replicated = (Ranks.of(mesh, torch.device("cpu")) for mesh in meshes)
        assert len(flat.groups) == 1 and len(replicated.groups) == 2
        gradient = torch.full((3,), 8.0)
        once = Collectives("backward", ("ALL_REDUCE",), "a")
        with replicated.agreement.run(once):
            dataclasses.replace(replicated, replicas=4, count=2).average_replicas([gradient])
        assert gradient.tolist() == [2.0, 2.0, 2.0]
