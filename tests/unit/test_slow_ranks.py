"""Rates that ranks agree on: of GPUs that they measure, and of disks.

With two processes, and who is slow: `tests/ranks/explain.py` and `tests/messages/test_ranks.py`.
"""

from __future__ import annotations

import platform
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacompile.cost import rank_rates
from megacompile.cost.hardware import H200, Hardware

CUDA = torch.device("cuda")


class Threads:
    """Ranks in threads, each with its own host name, and their collectives."""

    def __init__(self, hosts: str, patch: pytest.MonkeyPatch) -> None:
        self.hosts = hosts
        self._mine = threading.local()
        self._said: list[Any] = [None] * len(hosts)
        self._all_here = threading.Barrier(len(hosts), timeout=100)
        self.mesh: Any = SimpleNamespace(
            size=lambda: self.hosts.count(self.host()), get_rank=lambda: self.rank, ndim=1
        )
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        patch.delenv("GROUP_RANK", raising=False)
        patch.setattr(platform, "node", self.host)

    @property
    def rank(self) -> int:
        found: int = self._mine.rank
        return found

    def host(self) -> str:
        return self.hosts[self.rank]

    def all_gather_object(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._all_here.wait()
        found = list(self._said)
        self._all_here.wait()
        return found

    def each(self, body: Callable[[int], Any]) -> Any:
        """What each rank finds: the same."""

        def bound(rank: int) -> Any:
            self._mine.rank = rank
            return body(rank)

        with ThreadPoolExecutor(len(self.hosts)) as threads:
            first, *others = threads.map(bound, range(len(self.hosts)))
        assert others == [first] * len(others)
        return first

    def agree(self, machines: list[Hardware | None], **options: Any) -> tuple[Any, list[int]]:
        """The agreed rates of ranks with GPUs, and the ranks that measured, with their number."""
        measured: list[int] = []

        def measure(device: torch.device, here: int, meet: Callable[[], object]) -> Hardware:
            measured.append(here)
            meet()
            return machines[self.rank] or SMALL

        probe = rank_rates.Probe(
            lambda device, here: machines[self.rank],
            measure,
            lambda *_: (395.0, 1e-5),
            lambda *_: 7.0,
        )
        found = self.each(
            lambda rank: rank_rates.agree(
                self.mesh, CUDA, self.all_gather_object, probe=probe, **options
            )
        )
        return found, measured


SMALL = H200.replace(host_memory_gb_s=50.0, update_gb_s=30.0, host_bytes=3 * 2**30)
LARGE = H200.replace(host_memory_gb_s=70.0, update_gb_s=40.0, host_bytes=9 * 2**30)
OTHER = H200.replace(matmul_tflop_s=400.0, sustained=1.0, host_memory_gb_s=80.0, copy_s=9e-6)


def test_ranks_measure_together_where_one_of_them_has_no_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks share a host; the third has its own."""
    threads = Threads("aab", monkeypatch)
    found, measured = threads.agree([None, LARGE, OTHER])
    assert sorted(measured) == [1, 2, 2], "as many as measure there at once"
    assert [(each.rank, each.host) for each in found.ranks] == [(0, "a"), (1, "a"), (2, "b")]
    assert found.ranks[1].hardware == LARGE.replace(host_memory_gb_s=120.0), "of both at once"
    slowest = found.hardware
    assert slowest.matmul_tflop_s * slowest.sustained == pytest.approx(400.0)
    assert slowest.host_memory_gb_s == 60.0 and slowest.copy_s == 9e-6
    assert slowest.update_gb_s == 30.0, "a rank's own, which the other one's were in the way of"
    assert slowest.host_bytes == 3 * 2**30 // 2, "of two ranks"
    assert (slowest.interconnect_gb_s, slowest.collective_s) == (395.0, 1e-5)
    assert slowest.network_gb_s == 7.0 and slowest.name == H200.name
    rates: Any = SimpleNamespace(on=lambda machine: machine.replace(**DISK))
    disk = rank_rates.SharedDisk(2, 500, rates)
    found, measured = threads.agree([SMALL, LARGE, OTHER], disks={0: disk, 1: disk})
    assert measured == [], "all have rates"
    assert found.ranks[0].hardware.disk_read_gb_s == 9.0 == 2 * found.hardware.disk_read_gb_s
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    found, _ = threads.agree([SMALL, LARGE, OTHER])
    assert found.hardware.host_bytes == 2**30, "of three ranks, as torchrun says"
    alone, _ = Threads("a", monkeypatch).agree([H200])
    assert alone.hardware.interconnect_gb_s == H200.interconnect_gb_s, "nobody to gather from"


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

    def agree(users: str, *, is_measured: bool = True) -> dict[int, tuple[Any, ...]]:
        def body(rank: int) -> Any:
            folder = str(tmp_path) if str(rank) in users else None
            options: dict[str, Any] = {"measured": is_measured, "load": load}
            return rank_rates.agree_disks(
                threads.mesh, folder, threads.all_gather_object, **options
            )

        measured.clear()
        disks = threads.each(body)
        return {rank: (each.ranks, each.share_bytes, each.rates) for rank, each in disks.items()}

    assert agree("0123") == {**dict.fromkeys((0, 1, 2), (3, 333, "a")), 3: (1, 1000, "b")}
    assert sorted(measured) == [0, 3]
    assert agree("12", is_measured=False) == dict.fromkeys((1, 2), (2, 500, None))
    assert not measured
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")  # two have another model
    assert agree("12") == dict.fromkeys((1, 2), (4, 250, "a"))
    assert measured == [1]
