"""Which rank is slow: by rates that ranks agree on, by their disks, and by traced steps.

With two processes: `tests/ranks/explain.py`. The text: `tests/messages/test_ranks.py`.
"""

from __future__ import annotations

import json
import platform
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacompile.cost import ranks, rates
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.probe import DiskRates
from megacompile.cost.ranks import Agreed, Probe, RankRates, SharedDisk, slow_rates
from megacompile.plan.setting import Setting
from megacompile.tracing.critical_path import RankSteps, last_rank

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def rows(*machines: Hardware) -> list[RankRates]:
    return [RankRates(i, "aabb"[i % 4], each) for i, each in enumerate(machines)]


def products(*tflop_s: float) -> list[Hardware]:
    return [H200.replace(matmul_tflop_s=each, sustained=1.0) for each in tflop_s]


# Rates.


@pytest.mark.parametrize(
    ("tflop_s", "slow"),
    [
        ((655, 657, 653, 610), [((3,), ("b",), 610, 655)]),
        ((655, 657, 610, 612), [((2, 3), ("b",), 610, 656)]),
        ((655, 645, 650, 640), []),  # what is measured a little apart is no difference
        ((655,), []),
    ],
    ids=str,
)
def test_the_slow_ones_are_named_beside_the_median_of_the_others(
    tflop_s: tuple[float, ...], slow: list[Any]
) -> None:
    found = slow_rates(rows(*products(*tflop_s)))
    assert [(each.ranks, each.hosts, each.value, each.median) for each in found] == slow
    for each in found:
        assert each.behind == pytest.approx(1 - each.value / each.median)
        assert each.fastest == max(tflop_s)


def test_other_figures() -> None:
    hot = H200.replace(sustained=0.7)  # a card that is slow for long alone is slow
    slow, *others = slow_rates(rows(H200, hot))
    assert {each.name for each in others} == {"fp32 matrix products", "fp8 matrix products"}
    assert slow.name == "matrix products" and slow.ranks == (1,)
    assert slow.behind == pytest.approx(1 - 0.7 / H200.sustained)
    other = slow.at_median(H200)
    assert other.matmul_tflop_s * 0.7 == pytest.approx(H200.matmul_tflop_s * H200.sustained)
    (late,) = slow_rates(rows(H200.replace(launch_s=8e-6), H200, H200))  # seconds: more is slow
    assert (late.name, late.ranks) == ("kernel launches", (0,))
    assert late.behind == pytest.approx(0.5)
    assert late.at_median(H200.replace(launch_s=8e-6)).launch_s == pytest.approx(H200.launch_s)
    assert slow_rates(rows(H200, H200.replace(matmul8_tflop_s=None))) == [], "one has none"


# Traced steps.


def steps(rank: int, waited: list[float], **busy_s: float) -> RankSteps:
    return RankSteps(rank, "ab"[rank % 2], 1.0, {"comm": 0.5, **busy_s}, tuple(waited))


def test_last_is_who_waits_least_in_most_steps() -> None:
    each = [
        steps(0, [0.9, 0.3, 0.3, 0.1], compute=0.6, h2d=0.3),
        steps(1, [0.0, 0.0, 0.2], compute=0.6, h2d=0.9),
        steps(2, [0.3, 0.3, 0.3], compute=0.7, h2d=0.3),
    ]
    last = last_rank(each)
    assert last is not None and (last.rank, last.host, last.steps, last.of) == (1, "b", 2, 3)
    assert (last.lane, last.busy_s, last.others_busy_s) == ("h2d", 0.9, 0.3)
    assert last.waited_s == pytest.approx((0.8 - 0.2) / 3)
    idle = last_rank([steps(0, [0.3], compute=0.6), steps(1, [0.1], compute=0.6)])
    assert idle is not None and idle.rank == 1 and idle.lane not in ("compute", "h2d", "comm")
    assert last_rank([steps(0, [0.3])]) is last_rank([]) is None
    assert last_rank([steps(0, []), steps(1, [0.1])]) is None


# What ranks agree on.


class Threads:
    """Ranks in threads, each with a host of its own name, and what they say to one another."""

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

    def told(self, value: Any) -> list[Any]:
        self._said[self.rank] = value
        self._all_here.wait()
        found = list(self._said)
        self._all_here.wait()
        return found

    def each(self, body: Callable[[int], Any]) -> list[Any]:
        """What each rank finds."""

        def bound(rank: int) -> Any:
            self._mine.rank = rank
            return body(rank)

        with ThreadPoolExecutor(len(self.hosts)) as threads:
            return list(threads.map(bound, range(len(self.hosts))))

    def agree(self, machines: list[Hardware | None], **options: Any) -> tuple[list[Any], list[int]]:
        """What ranks with GPUs find, and who has measured, among how many."""
        measured: list[int] = []

        def measure(device: torch.device, here: int, meet: Callable[[], object]) -> Hardware:
            measured.append(here)
            meet()
            return machines[self.rank] or SMALL

        probe = Probe(
            lambda device, here: machines[self.rank],
            measure,
            lambda *_: (395.0, 1e-5),
            lambda *_: 7.0,
        )
        return self.each(
            lambda rank: ranks.agree(self.mesh, CUDA, self.told, probe=probe, **options)
        ), measured


SMALL = H200.replace(host_memory_gb_s=50.0, update_gb_s=30.0, host_bytes=3 * 2**30)
LARGE = H200.replace(host_memory_gb_s=70.0, update_gb_s=40.0, host_bytes=9 * 2**30)
OTHER = H200.replace(matmul_tflop_s=400.0, sustained=1.0, host_memory_gb_s=80.0, copy_s=9e-6)


def test_ranks_measure_together_where_one_of_them_has_no_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two are of one host, the third has one of its own."""
    threads = Threads("aab", monkeypatch)
    (found, *others), measured = threads.agree([None, LARGE, OTHER])
    assert others == [found] * 2
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
    _, measured = threads.agree([SMALL, LARGE, OTHER])
    assert measured == [], "all have rates"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    (found, *_), _ = threads.agree([SMALL, LARGE, OTHER])
    assert found.hardware.host_bytes == 2**30, "of three ranks, as torchrun says"
    ((alone,), _) = Threads("a", monkeypatch).agree([H200])
    assert alone.hardware.interconnect_gb_s == H200.interconnect_gb_s, "nobody to gather from"


DISK_OF_A, DISK_OF_B = DiskRates(9.0, 6.0, 6.0, 3.0), DiskRates(2.0, 1.0, 1.0, 0.5)


def test_ranks_on_a_cpu_have_measured_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each has had the host for itself: it has what one of them got, and plans with a share."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = Threads("aa", monkeypatch)
    disks = {0: SharedDisk(3, 333, DISK_OF_A), 1: SharedDisk(1, 1000, DISK_OF_B)}

    def agreed() -> list[Any]:
        return threads.each(lambda _: ranks.agree(threads.mesh, CPU, threads.told, disks))

    assert agreed() == [None, None], "nobody measures for a plan"
    path = rates._file(CPU)
    assert path is not None
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(H200)))
    found, again = agreed()
    assert found == again
    assert [each.hardware.host_memory_gb_s for each in found.ranks] == [H200.host_memory_gb_s] * 2
    machine = found.hardware
    assert machine.host_memory_gb_s == H200.host_memory_gb_s / 2
    assert machine.update_gb_s == H200.update_gb_s
    assert (machine.disk_read_gb_s, machine.disk_write_gb_s) == (2.0, 1.0), "the slowest share"
    assert (machine.disk_read_both_gb_s, machine.disk_write_both_gb_s) == (1.0, 0.5)
    assert [each.hardware.disk_read_gb_s for each in found.ranks] == [9.0, 2.0]
    writes, reads = slow_rates(found.ranks)
    assert (reads.name, writes.name) == ("reads of the disk", "writes to the disk")
    assert reads.ranks == writes.ranks == (1,)


def test_a_disk_is_measured_by_one_of_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three ranks of a host with a disk of 1000 bytes, and one of another."""
    threads, measured = Threads("aaab", monkeypatch), list[int]()
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)

    def load(folder: str) -> DiskRates:
        measured.append(threads.rank)
        return DISK_OF_A if threads.host() == "a" else DISK_OF_B

    def agree(users: str, *, is_measured: bool = True) -> dict[int, SharedDisk]:
        def body(rank: int) -> dict[int, SharedDisk]:
            folder = str(tmp_path) if str(rank) in users else None
            options: dict[str, Any] = {"measured": is_measured, "load": load}
            return ranks.agree_disks(threads.mesh, folder, threads.told, **options)

        measured.clear()
        first, *others = threads.each(body)
        assert others == [first] * 3
        result: dict[int, SharedDisk] = first
        return result

    of_a, of_b = SharedDisk(3, 333, DISK_OF_A), SharedDisk(1, 1000, DISK_OF_B)
    assert agree("0123") == {0: of_a, 1: of_a, 2: of_a, 3: of_b}
    assert sorted(measured) == [0, 3]
    assert agree("12", is_measured=False) == dict.fromkeys((1, 2), SharedDisk(2, 500, None))
    assert not measured
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")  # two have another model
    assert agree("12") == dict.fromkeys((1, 2), SharedDisk(4, 250, DISK_OF_A))
    assert measured == [1]


def test_what_a_rank_plans_with_of_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    agreed = Agreed(DISK_OF_B.on(H200), ())
    options: Any = SimpleNamespace(device=CUDA, disk=str(tmp_path), disk_memory=None)
    assert Setting(options, agreed=agreed).rates().disk_read_gb_s == 2.0, "nobody measures again"
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)

    def budget(limit: int | None, hardware: Hardware | None = None) -> int | None:
        options.disk_memory = limit
        return Setting(options, hardware, disk_bytes=250).disk_budget_bytes()

    assert budget(None) == 250 and budget(200) == 200
    assert budget(600) == budget(600, H200) == 250, "of each rank, of which there are four"
    free.free = 100
    assert budget(None) == 100, "something else lies there by now"


@pytest.mark.thorough
def test_what_a_gpu_is_measured_at_among_ranks_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    met = [0]
    gpu = SimpleNamespace(uuid="one")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)

    def meet() -> None:
        met[0] += 1

    found = rates.measure_of_rank(CPU, 2, meet=meet)
    assert met == [3] and 0 < found.update_gb_s <= found.host_memory_gb_s
    assert rates.cached_of_rank(CPU, 2) == found
    assert rates.cached_of_rank(CPU, 4) is rates.cached(CPU) is None
    gpu.uuid = "another"
    assert rates.cached_of_rank(CPU, 2) is None
