"""Which rank is slow: by rates, and by a trace of all ranks."""

from __future__ import annotations

import datetime
import json
import math
import platform
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megacompile import explain, megacompile
from megacompile.cost import probe, ranks, rates
from megacompile.cost.disk import DiskRates
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.ranks import Agreed, SharedDisk
from megacompile.cost.slowest import RankRates, slow_rates
from megacompile.plan import setting
from megacompile.plan.slow_ranks import SlowRank, is_felt, last_text
from megacompile.tracing.critical_path import NONE
from megacompile.tracing.rank_steps import RankSteps, last_rank
from tests.processes import group_of_one
from tests.rank_explain import LAYERS, MICRO, STEPS
from tests.test_ranks import torchrun


def test_two_ranks_whose_rates_and_work_differ(tmp_path: Path) -> None:
    each_found = torchrun("explain", 2, tmp_path)
    for name in ("gather", "sum"):
        first, second = (found[name] for found in each_found)
        assert first == second, "the slowest rank's"
    assert 0.01 < each_found[0]["sum"] < 100 and 0 < each_found[0]["gather"][1] < 1
    for found in each_found:
        for name in ("unknown", "one has rates", "given"):
            assert found[name]["slow_ranks"] == () and found[name]["ranks"] == 2, name
            assert "interconnect" in found[name]["bounds"]
        slow = {each["rate"]["name"]: each for each in found["rates"]["slow_ranks"]}
        assert set(slow) == {"fp32 matrix products", "copies to the GPU", "host memory"}
        products = slow["fp32 matrix products"]
        assert products["rate"]["ranks"] == (1,) and products["rate"]["behind"] > 0.19
        assert products["rate"]["hosts"] == ("host1",)
        assert found["rates"]["hosts"] == ("host0", "host1")
        assert products["shorter"] == max(each["shorter"] for each in slow.values()) > 0.1
        assert found["alone"]["last_rank"] is None, "nobody has compared the ranks"
        assert [each["rank"] for each in found["told"]] == [0, 1]
        assert all(len(each["waited_s"]) == STEPS - 1 for each in found["told"])
        last = found["traced"]["last_rank"]
        assert last["rank"] == 1 and last["lane"] == "compute" and last["of"] == STEPS - 1
        assert last["busy_s"] > 2 * last["others_busy_s"] and last["waited_s"] > 0
        assert json.loads(json.dumps(found["traced"]))["last_rank"]["rank"] == 1
        slowest = found["text"].partition("\nthe slowest rank\n")[2]
        assert slowest.startswith("  - 1 (host host1): fp32 matrix products at 0.008 TFLOP/s where")
        assert f"1 (host host1) came last in {last['steps']} of {STEPS - 1} traced steps" in slowest
        assert "on each of 2 ranks' NVIDIA H200" in found["text"]
        assert found["saved"] == 2 and found["nothing"] == {"Net": ()}
        assert "compare_ranks(): this trace is still on" in found["on"]
        assert "compare_ranks(): no ranks share what was traced" in found["no ranks"]
    check_joint(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    first, second = (
        [each["rate"] for each in found["rates"]["slow_ranks"]] for found in each_found
    )
    assert sorted(map(str, first)) == sorted(map(str, second)), "one of them may print"


def check_joint(events: list[dict[str, Any]]) -> None:
    """One file has the processes of all ranks, on one clock."""
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert len(names) == len(set(names.values())) == len(set(order.values())), names
    assert {e["pid"] for e in events} == names.keys() == order.keys()
    collectives = []
    for rank in (0, 1):
        start = f"rank {rank}: Net, measured"
        (pid,) = (pid for pid, name in names.items() if name.startswith(start))
        lanes = {
            e["tid"]: e["args"]["name"]
            for e in events
            if e["pid"] == pid and e["name"] == "thread_name"
        }
        assert {"compute", "h2d", "d2h", "comm"} <= set(lanes.values())
        ops = [e for e in events if e["pid"] == pid and e["ph"] == "X"]
        assert {lanes[e["tid"]] for e in ops} >= {"compute", "comm"}
        of_ranks = [e for e in ops if lanes[e["tid"]] == "comm"]
        collectives.append(sorted(of_ranks, key=lambda e: e["ts"]))
    first, second = collectives
    assert [e["name"] for e in first] == [e["name"] for e in second] != []
    counts = Counter(e["name"].lstrip("0123456789").partition("@")[0] for e in first)
    # backwards take all weights from the slots; they sum gradients each: see decision 36
    assert counts == {"ALL_GATHER": LAYERS * MICRO, "REDUCE_SCATTER": LAYERS * MICRO}
    for here, there in zip(first, second, strict=True):  # over when all are in it
        assert here["ts"] <= there["ts"] + there["dur"], here["name"]
        assert there["ts"] <= here["ts"] + here["dur"], here["name"]


def rows(*machines: Hardware, hosts: str = "aabb") -> list[RankRates]:
    return [RankRates(i, hosts[i % len(hosts)], each) for i, each in enumerate(machines)]


def products(*tflop_s: float) -> list[Hardware]:
    return [H200.replace(matmul_tflop_s=each, sustained=1.0) for each in tflop_s]


def test_the_slow_ones_are_named_beside_the_median_of_the_others() -> None:
    (slow,) = slow_rates(rows(*products(655, 657, 653, 610)))
    assert (slow.ranks, slow.hosts) == ((3,), ("b",))
    assert (slow.value, slow.median, slow.fastest) == (610, 655, 657)
    assert slow.behind == pytest.approx(1 - 610 / 655)
    text = SlowRank(slow, 0.05).text(with_host=True)
    assert text.startswith(
        "3 (host b): matrix products at 610 TFLOP/s where the others reach 655; at that a step "
        "would be 5% shorter"
    )
    assert SlowRank(slow, 0.05).text(with_host=False).startswith("3: matrix products")
    assert SlowRank(slow, 0.05).matters and not SlowRank(slow, 0.009).matters
    (both,) = slow_rates(rows(*products(655, 657, 610, 612)))
    assert (both.ranks, both.hosts, both.value) == ((2, 3), ("b",), 610)


def test_what_is_measured_a_little_apart_is_no_difference() -> None:
    assert slow_rates(rows(*products(655, 645, 650, 640))) == []
    assert slow_rates(rows(*products(655, 655))) == []
    assert slow_rates(rows(*products(655))) == slow_rates([]) == []


def test_a_card_that_is_slow_for_long_alone_is_slow() -> None:
    hot = H200.replace(sustained=0.7)
    slow, *others = slow_rates(rows(H200, hot))
    assert {each.name for each in others} == {"fp32 matrix products", "fp8 matrix products"}
    assert slow.name == "matrix products" and slow.ranks == (1,)
    assert slow.behind == pytest.approx(1 - 0.7 / H200.sustained)
    other = slow.at_median(H200)
    assert other.matmul_tflop_s * 0.7 == pytest.approx(H200.matmul_tflop_s * H200.sustained)


def test_seconds_are_slow_where_they_are_more() -> None:
    (slow,) = slow_rates(rows(H200.replace(launch_s=8e-6), H200, H200))
    assert (slow.name, slow.ranks) == ("kernel launches", (0,))
    assert slow.behind == pytest.approx(0.5)
    assert slow.at_median(H200.replace(launch_s=8e-6)).launch_s == pytest.approx(H200.launch_s)
    assert "at 8 us where the others take 4" in SlowRank(slow, 0.0).text(with_host=False)


def test_what_one_rank_has_not_is_not_compared() -> None:
    assert slow_rates(rows(H200, H200.replace(matmul8_tflop_s=None))) == []


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
    assert is_felt(last)
    assert last_text(last, with_host=True) == (
        "1 (host b) came last in 2 of 3 traced steps: its h2d is busy for 900 ms a step where the "
        "others' is for 300 ms; the others wait 200 ms a step longer in collectives"
    )


def test_a_rank_that_is_late_and_not_busy() -> None:
    last = last_rank([steps(0, [0.3], compute=0.6), steps(1, [0.1], compute=0.6)])
    assert last is not None and (last.rank, last.lane) == (1, NONE)
    assert "no recorded op of it takes longer" in last_text(last, with_host=False)
    assert last_rank([steps(0, [0.3])]) is last_rank([]) is None
    assert last_rank([steps(0, []), steps(1, [0.1])]) is None


def test_ranks_measure_together_where_one_of_them_has_no_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 are of one host, where torchrun has three; rank 2 has one of its own."""
    other = H200.replace(matmul_tflop_s=400.0, sustained=1.0, host_memory_gb_s=80.0, copy_s=9e-6)
    small = H200.replace(host_memory_gb_s=50.0, update_gb_s=30.0, host_bytes=3 * 2**30)
    large = H200.replace(host_memory_gb_s=70.0, update_gb_s=40.0, host_bytes=9 * 2**30)
    hosts = (("0", "a"), ("0", "a"), ("1", "b"))
    rows: list[Hardware | None] = [None, large, other]
    measured: list[int] = []
    said: list[Any] = []

    def told(value: Any) -> list[Any]:
        said.append(value)
        if value == hosts[1]:
            return list(hosts)
        if value is None or isinstance(value[0], float):
            return [value] * 3
        found = [(i, hosts[i], (3, 3, 1)[i], each) for i, each in enumerate(rows)]
        return [found[0], value, found[2]]

    def measure(device: Any, ranks: int, *, meet: Any) -> Hardware:
        measured.append(ranks)
        rows[0] = small
        meet()
        return large

    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(platform, "node", lambda: "a")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(ranks, "cached_of_rank", lambda *_: large)
    monkeypatch.setattr(ranks, "measure_of_rank", measure)
    monkeypatch.setattr(ranks, "_interconnect", lambda *_: (395.0, 1e-5))
    mesh: Any = SimpleNamespace(get_rank=lambda: 1, ndim=1)
    found = ranks.agree(mesh, torch.device("cuda"), told)
    assert found is not None and measured == [2], "as many as measure there at once"
    assert [(each.rank, each.host) for each in found.ranks] == [(0, "a"), (1, "a"), (2, "b")]
    whole = large.replace(host_memory_gb_s=120.0)  # what both got of it at once
    assert found.ranks[1].hardware == whole, "though none of them is torchrun's first there"
    slowest = found.hardware
    assert slowest.matmul_tflop_s * slowest.sustained == pytest.approx(400.0)
    assert slowest.host_memory_gb_s == 60.0 and slowest.copy_s == 9e-6
    assert slowest.update_gb_s == 30.0, "a rank's own, which the other one's were in the way of"
    assert slowest.host_bytes == 2**30, "of three ranks"
    assert (slowest.interconnect_gb_s, slowest.collective_s) == (395.0, 1e-5)
    assert slowest.name == H200.name


def test_one_rank_measures_no_interconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(ranks, "cached_of_rank", lambda *_: H200)
    mesh: Any = SimpleNamespace(ndim=1)
    found = ranks.agree(mesh, torch.device("cuda"), lambda value: [value])
    assert found is not None and found.hardware.interconnect_gb_s == H200.interconnect_gb_s
    assert [each.rank for each in found.ranks] == [0]


def test_ranks_on_a_cpu_have_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has had the host for itself: it has what one of them got."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(ranks, "cached", lambda device: H200)

    def told(value: Any) -> list[Any]:
        if len(value) == 2:
            return [value] * 2
        rank, host, of_host, hardware = value
        return [value, (1, host, of_host, hardware.replace(host_memory_gb_s=100.0))]

    mesh: Any = SimpleNamespace()
    found = ranks.agree(mesh, torch.device("cpu"), told)
    assert found is not None
    assert [each.hardware.host_memory_gb_s for each in found.ranks] == [100.0, 100.0]
    assert found.hardware.host_memory_gb_s == 50.0
    assert found.hardware.update_gb_s == H200.update_gb_s


DISK_OF_A, DISK_OF_B = DiskRates(9.0, 6.0, 6.0, 3.0), DiskRates(2.0, 1.0, 1.0, 0.5)


class Hosts:
    """Ranks in threads, and which of them measured a disk."""

    def __init__(self, hosts: str) -> None:
        self.hosts = hosts
        self.measured: list[int] = []
        self._mine = threading.local()
        self._said: list[Any] = [None] * len(hosts)
        self._all_here = threading.Barrier(len(hosts), timeout=20)

    def rank(self) -> int:
        found: int = self._mine.rank
        return found

    def host(self) -> str:
        return self.hosts[self.rank()]

    def told(self, value: Any) -> list[Any]:
        self._said[self.rank()] = value
        self._all_here.wait()
        found = list(self._said)
        self._all_here.wait()
        return found

    def measure(self, folder: Any) -> DiskRates:
        self.measured.append(self.rank())
        return DISK_OF_A if self.host() == "a" else DISK_OF_B

    def agree(self, folders: list[Path | None], **options: Any) -> list[dict[int, SharedDisk]]:
        """What each rank finds."""
        mesh: Any = SimpleNamespace(size=lambda: len(self.hosts), get_rank=self.rank)

        def agreed(rank: int, folder: Path | None) -> dict[int, SharedDisk]:
            self._mine.rank = rank
            path = None if folder is None else str(folder)
            return ranks.agree_disks(mesh, path, self.told, **options)

        with ThreadPoolExecutor(len(self.hosts)) as threads:
            return list(threads.map(agreed, range(len(self.hosts)), folders))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Three ranks of a host with a disk of 1000 bytes, and one of another."""
    found = Hosts("aaab")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.distributed, "get_rank", found.rank)
    monkeypatch.setattr(platform, "node", found.host)
    monkeypatch.setattr(ranks, "ranks_of_host", lambda mesh: found.hosts.count(found.host()))
    monkeypatch.setattr(rates, "measure_disk", found.measure)
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    return found


def test_a_disk_is_measured_by_one_of_its_ranks(hosts: Hosts, tmp_path: Path) -> None:
    first, *others = hosts.agree([tmp_path] * 4, measured=True)
    assert sorted(hosts.measured) == [0, 3]
    assert first == dict.fromkeys(range(3), SharedDisk(3, 333, DISK_OF_A)) | {
        3: SharedDisk(1, 1000, DISK_OF_B)
    }
    assert all(other == first for other in others)
    assert hosts.agree([tmp_path] * 4, measured=True) == [first] * 4
    assert sorted(hosts.measured) == [0, 3], "what was measured is kept"


def test_ranks_without_a_disk_or_with_one_that_is_not_measured(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hosts.agree([None] * 4, measured=True) == [{}] * 4
    found = hosts.agree([None, tmp_path, tmp_path, None], measured=False)
    assert found == [dict.fromkeys((1, 2), SharedDisk(2, 500, None))] * 4
    assert hosts.measured == []
    monkeypatch.setattr(ranks, "ranks_of_host", lambda mesh: 5)  # two have another model
    found = hosts.agree([None, tmp_path, tmp_path, None], measured=True)
    assert found == [dict.fromkeys((1, 2), SharedDisk(4, 250, DISK_OF_A))] * 4
    assert hosts.measured == [1]


def test_plans_have_the_slowest_share_of_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has a third of a fast one, rank 1 a slow one of its own."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(ranks, "cached", lambda device: H200)

    def told(value: Any) -> list[Any]:
        return [value] * 2 if len(value) == 2 else [value, (1, *value[1:])]

    mesh: Any = SimpleNamespace(size=lambda: 2)
    disks = {0: SharedDisk(3, 333, DISK_OF_A), 1: SharedDisk(1, 1000, DISK_OF_B)}
    found = ranks.agree(mesh, torch.device("cpu"), told, disks)
    assert found is not None
    machine = found.hardware
    assert (machine.disk_read_gb_s, machine.disk_write_gb_s) == (2.0, 1.0)
    assert (machine.disk_read_both_gb_s, machine.disk_write_both_gb_s) == (1.0, 0.5)
    assert [each.hardware.disk_read_gb_s for each in found.ranks] == [9.0, 2.0]
    writes, reads = slow_rates(found.ranks)
    assert (reads.name, writes.name) == ("reads of the disk", "writes to the disk")
    assert reads.ranks == writes.ranks == (1,)


def test_ranks_do_not_measure_again_when_they_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setting, "load_disk", lambda folder: pytest.fail("measured by each rank"))
    agreed = Agreed(DISK_OF_B.on(H200), ())
    options: Any = SimpleNamespace(device=torch.device("cuda"), disk=str(tmp_path))
    assert setting.Setting(options, agreed=agreed).rates().disk_read_gb_s == 2.0


def test_the_place_on_a_disk_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)

    def budget(limit: int | None, hardware: Hardware | None = None) -> int | None:
        options: Any = SimpleNamespace(disk=str(tmp_path), disk_memory=limit)
        return setting.Setting(options, hardware, disk_bytes=250).disk_budget_bytes()

    assert budget(None) == 250 and budget(200) == 200
    assert budget(600) == budget(600, H200) == 250, "of each rank, of which there are four"
    free.free = 100
    assert budget(None) == 100, "something else lies there by now"


def test_megacompile_gives_each_rank_its_part_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    free = SimpleNamespace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with group_of_one(datetime.timedelta(seconds=20)):
        mesh = init_device_mesh("cpu", (1,))
        model = megacompile(nn.Linear(8, 8), mesh=mesh, device="cpu", disk=tmp_path)
        model(torch.ones(2, 8)).sum().backward()
        disk = explain(model, changes=False).disk
    assert disk is not None and disk.there_bytes == 2**28


def test_what_a_gpu_is_measured_at_among_ranks_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(probe, "_SUSTAINED_S", 0.001)
    cpu, met = torch.device("cpu"), [0]
    gpu = SimpleNamespace(uuid="one")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)

    def meet() -> None:
        met[0] += 1

    found = rates.measure_of_rank(cpu, 2, meet=meet)
    assert met == [3] and 0 < found.update_gb_s <= found.host_memory_gb_s < math.inf
    assert rates.cached_of_rank(cpu, 2) == found
    assert rates.cached_of_rank(cpu, 4) is rates.cached(cpu) is None
    gpu.uuid = "another"
    assert rates.cached_of_rank(cpu, 2) is None
