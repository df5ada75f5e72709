"""Host memory: how much there is, what fits, what a model holds; and settings of the process.

The process has one CUDA allocator and one garbage collector, which megacompile() sets.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megacompile import HostMemoryError, compat, megacompile
from megacompile.host_memory import available_bytes, budget_bytes, check_host_memory, total_bytes

GIB = 2**30
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets the GiB that are free, and the system's files that `host_memory` reads."""
    read = Path.read_text

    def elsewhere(path: Path, *args: Any, **given: Any) -> str:
        if str(path).startswith(("/proc/", "/sys/")):
            path = tmp_path / path.relative_to("/")
        return read(path, *args, **given)

    def write(free: int, files: dict[str, int | str] | None = None, line: str = "0::/") -> None:
        memory = SimpleNamespace(available=free * GIB, total=99 * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        places = {f"sys/fs/cgroup/{name}": value for name, value in (files or {}).items()}
        for name, value in {**places, "proc/self/cgroup": line}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{value * GIB if isinstance(value, int) else value}\n")

    monkeypatch.setattr(Path, "read_text", elsewhere)
    return write


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
STAT = f"anon 5\ninactive_file {2 * GIB}\nfile 7"


@pytest.mark.parametrize(
    ("line", "files", "wanted"),
    [
        ("0::/", {}, 10),
        ("0::/", {"memory.max": "max", "memory.current": 5}, 10),
        ("0::/", {"memory.max": 8, "memory.current": 5}, 3),
        ("0::/", {"memory.max": 64, "memory.current": 5}, 10),  # more than there is
        ("0::/", {"memory.max": 8, "memory.current": 5, "memory.stat": STAT}, 5),
        ("0::/job/step", {"job/memory.max": 8, "job/memory.current": 2}, 6),  # SLURM
        ("0::/job/step", {"job/memory.max": 8, "job/memory.current": 7, "memory.max": 20}, 1),
        # outside of what we see
        ("0::/../job", {"job/memory.max": 8, "job/memory.current": 2}, 10),
        ("4:cpu,memory:/a\n0::/", {f"memory/a/{V1[0]}": 5, f"memory/a/{V1[1]}": 2}, 3),
        # a container that sees its own at the root
        ("4:memory:/unseen", {f"memory/{V1[0]}": 5, f"memory/{V1[1]}": 1}, 4),
    ],
)
def test_limits_of_the_cgroups_around_it(
    machine: Machine, line: str, files: dict[str, int | str], wanted: int
) -> None:
    machine(10, files, line)
    assert available_bytes() == wanted * GIB


def test_limits_of_the_process(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ulimit -v` and `ulimit -d`; -1: none."""
    resource = pytest.importorskip("resource")
    machine(10)
    pages = GIB // resource.getpagesize()
    (tmp_path / "proc" / "self" / "statm").write_text(f"{pages} 1 1 1 0 {2 * pages} 0\n")
    infinity, limit = resource.RLIM_INFINITY, dict[int, int]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit[kind], infinity))
    for address, data, wanted in ((9, -1, 8), (9, 3, 1), (-1, -1, 10)):
        for kind, gib in ((resource.RLIMIT_AS, address), (resource.RLIMIT_DATA, data)):
            limit[kind] = gib * GIB if gib >= 0 else infinity
        assert available_bytes() == wanted * GIB


def test_too_little_memory_is_an_error(machine: Machine) -> None:
    machine(64, {"memory.max": 16, "memory.current": 4})
    assert total_bytes() == 16 * GIB
    machine(64, {"memory.max": "max"})
    assert total_bytes() == 99 * GIB
    machine(64, {"memory.max": 16, "memory.current": 4})
    check_host_memory([("parameters to move", 9 * GIB), ("gradients", 3 * 2**29)])
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory([("parameters to move", 9 * GIB), ("gradients", 3 * GIB)])
    assert isinstance(caught.value, MemoryError)
    check_host_memory([("parameters", 2 * 2**20)], 2 * 2**20)
    with pytest.raises(HostMemoryError):
        check_host_memory([("parameters", 2 * 2**20)], 2**20)


def test_memory_that_was_written_counts_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=200 * GIB, total=300 * GIB)  # the margin is constant
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def more_bytes(held_bytes: int) -> int:
        """By what a model that holds so much may take more than one that holds nothing."""
        return budget_bytes(held_bytes) - budget_bytes()

    weights = torch.ones(GIB // 16)
    assert more_bytes(weights.nbytes) == weights.nbytes
    before = more_bytes(64 * GIB)
    assert before < 64 * GIB
    unwritten = torch.empty(GIB)
    assert more_bytes(64 * GIB) - before < unwritten.nbytes / 16


def test_pages_of_a_file_do_not_count(machine: Machine, tmp_path: Path) -> None:
    """A checkpoint that is mapped can be reclaimed; shared memory cannot."""
    machine(200)
    status = tmp_path / "proc" / "self" / "status"
    kib = GIB // 1024
    status.write_text(f"RssAnon: {3 * kib} kB\nRssFile: {9 * kib} kB\nRssShmem: {kib} kB\n")
    assert budget_bytes(64 * GIB) - budget_bytes() == 4 * GIB
    status.write_text(f"VmRSS: {13 * kib} kB\n")  # a system that does not distinguish them
    rss = psutil.Process().memory_info().rss
    assert budget_bytes(64 * GIB) - budget_bytes() == pytest.approx(rss, rel=0.2)


def test_the_margin(machine: Machine) -> None:
    for free, beside_gib, wanted in (
        (1000, 0.0, 994.0),  # it does not grow for ever
        (10, 0.01, 9.6),  # and holds what is beside
        (10, 1.0, 8.75),
        (0, 1.0, 0.0),
    ):
        machine(free)
        found = budget_bytes(0, beside_bytes=int(beside_gib * GIB))
        assert found == pytest.approx(wanted * GIB, abs=GIB / 1000)
        assert not free or budget_bytes(share=2) <= free * GIB / 2


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator was told, in a process where nobody has told it anything."""
    told: list[str] = []
    for name in NAMES:
        monkeypatch.setenv(name, "")  # put back at the end
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", str, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    return told


def test_segments_may_grow_but_not_where_memory_was_taken_before(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took it (an engine with memory pools of its own) has asked the environment before."""
    taken = {"segment.all.allocated": 3}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: taken if device else {})
    assert not compat.use_expandable_segments()
    assert said == [] and os.environ[NAMES[0]] == ""
    taken["segment.all.allocated"] = 0
    assert compat.use_expandable_segments()
    assert said == ["expandable_segments:True"]
    assert [os.environ[name] for name in NAMES] == 2 * ["expandable_segments:True"]


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_what_the_user_says_stays(
    said: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment, or by a call."""
    if name:
        monkeypatch.setenv(name, "expandable_segments:False")
    else:
        settings = "garbage_collection_threshold:0.8"
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: settings)
    assert not compat.use_expandable_segments() and said == []


@pytest.mark.parametrize(("threshold", "frozen"), [(700, False), (0, False), (700, True)])
def test_the_collector_is_afterwards_as_before(threshold: int, frozen: bool) -> None:
    """Old objects are left out while a plan is made. Somebody may have frozen some, or never want
    the collector to run."""
    before = gc.get_threshold()
    gc.set_threshold(threshold)
    try:
        if frozen:
            gc.freeze()
        count = gc.get_freeze_count()
        model = megacompile(torch.nn.Linear(4, 4), device="cpu", gpu_memory="1GiB")
        model(torch.ones(2, 4)).sum().backward()
        assert gc.get_threshold()[0] == threshold
        # other threads may let some of the frozen objects die
        assert 0.99 * count <= gc.get_freeze_count() <= count
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
