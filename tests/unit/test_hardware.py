"""Machines: given by name, changed, measured once and kept in a file; memory of the host.

How much memory there is, what fits, what a model holds; and settings of the process, which has one
CUDA allocator and one garbage collector.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megacompile import compat, megacompile
from megacompile.cli import main
from megacompile.cost import rates
from megacompile.cost.hardware import H200, NAMES, Hardware
from megacompile.errors import OptionError
from megacompile.host_memory import available_bytes, budget_bytes

CPU = torch.device("cpu")
MAY_BE_ZERO = ("name", "collective_s", "gathers_over_pcie", "unified", "host_bytes")


def check(found: Hardware, *unknown: str) -> None:
    """All figures that can be measured are there and consistent."""
    for field in fields(Hardware):
        value = getattr(found, field.name)
        if field.name in unknown or field.name.startswith("disk_"):
            assert value is None, field.name
        elif field.name not in MAY_BE_ZERO:
            assert value > 0, field.name
            assert math.isfinite(value) or found.name == "CPU", "it is no device"
    assert found.h2d_both_gb_s <= found.h2d_gb_s and found.sustained <= 1.0
    assert found.update_gb_s <= found.host_memory_gb_s


def test_known_machines_are_whole_and_may_be_changed() -> None:
    for name in (name for name in NAMES if name != "this"):
        found = rates.known(name)
        assert found == rates.known(name.upper())
        old = name not in ("h100", "h200", "gh200", "4090", "5090", "gb10")  # without fp8
        of_host = ["locked_bytes", "network_gb_s"]  # a GPU does not say what that is
        of_host += [] if name == "gh200" or found.unified else ["host_bytes"]
        check(found, *of_host, *(["matmul8_tflop_s"] if old else []))
        assert found.matmul32_tflop_s < found.matmul_tflop_s
    changed = H200.replace(host_bytes=2**40, launch_s=0.0)
    assert (changed.host_bytes, changed.launch_s, changed.name) == (2**40, 0.0, H200.name)
    assert H200.host_bytes is None is changed.replace(host_bytes=None).host_bytes
    assert H200.replace(locked_bytes=8).shared_by(2).locked_bytes == 4
    assert H200.shared_by(2).locked_bytes is None
    wrong: dict[str, Any] = {"host_gib": 1, "h2d_gb_s": 0.0, "device_bytes": -1, "copy_s": math.nan}
    for name, value in wrong.items():
        with pytest.raises(OptionError, match=name):
            H200.replace(**{name: value})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's, with the file of a machine that has been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = rates._file(CPU)
    assert path is not None and path.parent == tmp_path / "megacompile"
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(H200)))
    yield path


def test_the_first_step_tells_its_plan(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in the first rank, where the machine has been measured."""
    monkeypatch.setenv("RANK", "0")

    def told(**options: Any) -> str:
        model = megacompile(torch.nn.Embedding(8, 4), device="cpu", lowering="eager", **options)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
            optimizer.step()
        return capsys.readouterr().err

    line = told()
    assert line.startswith("megacompile: Embedding, 32 parameters: ") and line.count("\n") == 1
    assert " tokens/s, " in line and " on the host" in line
    assert told(progress=False) == ""
    monkeypatch.setenv("RANK", "1")
    assert told() == ""
    cache.unlink()
    monkeypatch.setenv("RANK", "0")
    assert told() == ""


WRONG = ["{", '{"name": "old"}', '{"unknown": 1}', "[1]"]
FIGURES = [0, -1.0, math.nan, math.inf, "fast", None, True, [1.0]]


def test_what_was_measured_is_not_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without figures is ignored, as are those of another torch or number of threads."""
    before = cache.stat().st_mtime_ns
    assert rates.load("cpu") == rates.cached(CPU) == H200
    assert main(["hardware", "--device", "cpu"]) == 0
    assert cache.stat().st_mtime_ns == before
    if not torch.cuda.is_available():
        assert rates.known("this") == H200
    for name, value in (("get_num_threads", lambda: 99), ("__version__", "9")):
        with monkeypatch.context() as other:
            other.setattr(torch, name, value)
            assert rates.cached(CPU) is None
    for text in (*WRONG, *(json.dumps({**asdict(H200), "h2d_gb_s": value}) for value in FIGURES)):
        cache.write_text(text)
        assert rates.cached(CPU) is None, text
    cache.unlink()
    os.mkfifo(cache)
    assert rates.cached(CPU) is None, "nor is a FIFO waited for"


def test_the_disk_of_a_folder(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rates are fields of the machine."""
    path = rates._disk_file(tmp_path)
    assert path is not None and rates.disk_on_file(tmp_path) is None
    names = [f"disk_{name}_gb_s" for name in ("read", "write", "read_both", "write_both")]
    measured = dict(zip(names, (4.0, 3.0, 2.0, 1.0), strict=True))
    path.write_text(json.dumps(measured))
    command = ["hardware", "--device", "cpu"]
    assert main([*command, "--disk", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in names} == measured
    assert main(command) == 0 and "disk_read" not in capsys.readouterr().out
    for text in ("{", '{"disk_read_gb_s": 1.0}', path.read_text().replace("1.0", "-1.0")):
        path.write_text(text)
        assert rates.disk_on_file(tmp_path) is None
    for wrong in (["--disk", str(tmp_path / "absent")], ["--device", "cuda:99"]):
        assert main([*command, *wrong]) == 2


def test_a_machine_is_measured_though_that_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    state, clock = torch.get_rng_state(), time.perf_counter
    with monkeypatch.context() as hurried, pytest.warns(UserWarning, match="XDG_CACHE_HOME"):
        hurried.setattr(time, "perf_counter", lambda: 100 * clock())
        found = rates.load("cpu", again=True)
    assert torch.equal(state, torch.get_rng_state()) and found.name == "CPU"
    # of a folder, of ranks, of a GPU
    check(found, "locked_bytes", "matmul8_tflop_s", "network_gb_s")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert rates.cached(CPU) is None


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


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator was told, in a process where nobody has told it anything."""
    told: list[str] = []
    for name in VARIABLES:
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
    assert said == [] and os.environ[VARIABLES[0]] == ""
    taken["segment.all.allocated"] = 0
    assert compat.use_expandable_segments()
    assert said == ["expandable_segments:True"]
    assert [os.environ[name] for name in VARIABLES] == 2 * ["expandable_segments:True"]


@pytest.mark.parametrize("name", [*VARIABLES, ""])
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
