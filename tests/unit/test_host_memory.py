"""How much host memory there is, what fits in it, and what a model holds already."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megacompile import HostMemoryError
from megacompile.host_memory import available_bytes, budget_bytes, check_host_memory, total_bytes

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what there is, and writes the files of the cgroup that `host_memory` reads."""
    read = Path.read_text

    def elsewhere(path: Path, *args: Any, **given: Any) -> str:
        """The files of the system are those of the test."""
        if str(path).startswith(("/proc/", "/sys/")):
            path = tmp_path / path.relative_to("/")
        return read(path, *args, **given)

    monkeypatch.setattr(Path, "read_text", elsewhere)

    def write(available: int, **cgroup: int | str) -> None:
        memory = SimpleNamespace(available=available, total=99 * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        folder = tmp_path / "sys" / "fs" / "cgroup"
        folder.mkdir(parents=True, exist_ok=True)
        inactive = cgroup.pop("inactive_file", None)
        if inactive is not None:
            (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nfile 7\n")
        for name, value in cgroup.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")

    return write


def test_available_memory_with_a_cgroup(machine: Callable[..., None]) -> None:
    rows: list[tuple[dict[str, Any], int]] = [
        ({}, 10),
        ({"max": "max", "current": 5 * GIB}, 10),
        ({"max": 8 * GIB, "current": 5 * GIB}, 3),
        ({"max": 64 * GIB, "current": 5 * GIB}, 10),  # more than there is
        ({"max": 8 * GIB, "current": 5 * GIB, "inactive_file": 2 * GIB}, 5),
    ]
    for cgroup, wanted in rows:
        machine(10 * GIB, **cgroup)
        assert available_bytes() == wanted * GIB
    assert total_bytes() == 8 * GIB
    machine(10 * GIB, max="max")
    assert total_bytes() == 99 * GIB


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(
    ("line", "files", "wanted"),
    [
        ("0::/job/step", {"job/memory.max": 8, "job/memory.current": 2}, 6),  # SLURM
        ("0::/job/step", {"job/memory.max": 8, "job/memory.current": 7, "memory.max": 20}, 1),
        (
            "0::/../job",
            {"job/memory.max": 8, "job/memory.current": 2},
            10,
        ),  # outside of what we see
        ("4:cpu,memory:/a\n0::/", {f"memory/a/{V1[0]}": 5, f"memory/a/{V1[1]}": 2}, 3),
        # a container that sees its own at the root
        ("4:memory:/unseen", {f"memory/{V1[0]}": 5, f"memory/{V1[1]}": 1}, 4),
    ],
)
def test_limits_of_the_cgroups_around_it(
    machine: Callable[..., None], tmp_path: Path, line: str, files: dict[str, int], wanted: int
) -> None:
    machine(10 * GIB)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(line + "\n")
    for name, size in files.items():
        place = tmp_path / "sys" / "fs" / "cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{size * GIB}\n")
    assert available_bytes() == wanted * GIB


@pytest.mark.parametrize(("limits", "wanted"), [((9, -1), 8), ((9, 3), 1), ((-1, -1), 10)])
def test_limits_of_the_process(
    machine: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    wanted: int,
) -> None:
    """`ulimit -v` and `ulimit -d`; -1: none."""
    resource = pytest.importorskip("resource")
    machine(10 * GIB)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    pages = GIB // resource.getpagesize()
    (tmp_path / "proc" / "self" / "statm").write_text(f"{pages} 1 1 1 0 {2 * pages} 0\n")
    of = dict(zip((resource.RLIMIT_AS, resource.RLIMIT_DATA), limits, strict=True))
    infinity = resource.RLIM_INFINITY
    limit = {kind: n * GIB if n >= 0 else infinity for kind, n in of.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit[kind], infinity))
    assert available_bytes() == wanted * GIB


def test_too_little_memory_is_an_error(machine: Callable[..., None]) -> None:
    machine(64 * GIB, max=16 * GIB, current=4 * GIB)
    check_host_memory([("parameters to move", 9 * GIB), ("gradients", 3 * 2**29)])
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory([("parameters to move", 9 * GIB), ("gradients", 3 * GIB)])
    assert isinstance(caught.value, MemoryError)
    check_host_memory([("parameters", 2 * 2**20)], 2 * 2**20)
    with pytest.raises(HostMemoryError):
        check_host_memory([("parameters", 2 * 2**20)], 2**20)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 GiB are free: the margin is constant."""
    memory = SimpleNamespace(available=200 * GIB, total=300 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def more_bytes(held_bytes: int) -> int:
    """By what a model that holds so much may take more than one that holds nothing."""
    return budget_bytes(held_bytes) - budget_bytes()


@pytest.mark.usefixtures("free")
def test_memory_that_was_written_counts_and_no_other() -> None:
    weights = torch.ones(GIB // 16)
    assert more_bytes(weights.nbytes) == weights.nbytes
    before = more_bytes(64 * GIB)
    assert before < 64 * GIB
    unwritten = torch.empty(GIB)
    assert more_bytes(64 * GIB) - before < unwritten.nbytes / 16


@pytest.mark.usefixtures("free")
def test_pages_of_a_file_do_not() -> None:
    before = more_bytes(64 * GIB)
    assert before < 64 * GIB
    with tempfile.TemporaryFile(dir=Path(__file__).parent) as file:  # /tmp may be memory
        file.write(bytes(GIB // 4))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        weights = torch.frombuffer(mapped, dtype=torch.uint8)
        assert weights.sum().item() == 0  # they are in RAM now
        assert more_bytes(64 * GIB) - before < GIB // 8
        del weights
        mapped.close()


def test_the_margin(machine: Callable[..., None]) -> None:
    for free_gib, beside_gib, wanted in (
        (1000, 0.0, 994.0),  # it does not grow for ever
        (10, 0.01, 9.6),  # and holds what is beside
        (10, 1.0, 8.75),
        (0, 1.0, 0.0),
    ):
        machine(free_gib * GIB)
        found = budget_bytes(0, beside_bytes=int(beside_gib * GIB))
        assert found == pytest.approx(wanted * GIB, abs=GIB / 1000)
        assert not free_gib or budget_bytes(share=2) <= free_gib * GIB / 2
