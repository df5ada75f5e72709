"""Machines: given by name, changed, measured once and kept in a file."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacompile.cli import main
from megacompile.cost import probe, rates
from megacompile.cost.hardware import H200, NAMES, Hardware
from megacompile.cost.rates import known
from megacompile.errors import OptionError
from megacompile.plan.scenario import faster

CPU = torch.device("cpu")
SHEETS = [name for name in NAMES if name != "this"]


def test_known_machines_are_whole() -> None:
    for name in SHEETS:
        found = known(name)
        assert found == known(name.upper())
        for field in fields(Hardware):
            value = getattr(found, field.name)
            of_host = ("host_bytes", "locked_bytes", "network_gb_s")
            if field.name in of_host or field.name.startswith("disk_"):
                assert value is None  # a GPU does not say what host it is in
            elif field.name == "matmul8_tflop_s" and name in ("a100", "3090", "3080"):
                assert value is None  # Ampere has no fp8
            elif field.name not in ("name", "collective_s", "gathers_over_pcie"):
                assert value > 0 and math.isfinite(value), field.name
        assert found.h2d_both_gb_s <= found.h2d_gb_s
        assert found.update_gb_s <= found.host_memory_gb_s
        assert found.matmul32_tflop_s < found.matmul_tflop_s
    assert faster(H200, "compute", 2.0).matmul8_tflop_s == 2 * 1609.0
    assert faster(known("a100"), "compute", 2.0).matmul8_tflop_s is None


def test_replace_gives_another_machine() -> None:
    changed = H200.replace(host_bytes=2**40, launch_s=0.0)
    assert (changed.host_bytes, changed.launch_s, changed.name) == (2**40, 0.0, H200.name)
    assert H200.host_bytes is None is changed.replace(host_bytes=None).host_bytes
    assert H200.replace(locked_bytes=8).shared_by(2).locked_bytes == 4
    assert H200.shared_by(2).locked_bytes is None
    wrong: dict[str, Any] = {"host_gib": 1, "h2d_gb_s": 0.0, "device_bytes": -1, "copy_s": math.nan}
    for name, value in wrong.items():
        with pytest.raises(OptionError, match=name):
            H200.replace(**{name: value})


# --- on file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's, with the file of a machine that has been measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = rates._file(CPU)
    assert path is not None and path.parent == tmp_path / "megacompile"
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(H200)))
    yield path


def test_what_was_measured_is_not_measured_again(cache: Path) -> None:
    before = cache.stat().st_mtime_ns
    assert rates.load("cpu") == rates.cached(CPU) == H200
    assert main(["hardware", "--device", "cpu"]) == 0
    assert cache.stat().st_mtime_ns == before
    if not torch.cuda.is_available():
        assert known("this") == H200


WRONG = ["{", '{"name": "old"}', '{"unknown": 1}', "[1]"]
FIGURES = [0, -1.0, math.nan, math.inf, "fast", None, True, [1.0]]


def test_a_file_that_has_no_figures_is_not_taken(cache: Path) -> None:
    for text in (*WRONG, *(json.dumps({**asdict(H200), "h2d_gb_s": value}) for value in FIGURES)):
        cache.write_text(text)
        assert rates.cached(CPU) is None, text
    cache.unlink()
    os.mkfifo(cache)
    assert rates.cached(CPU) is None, "nor is a FIFO waited for"


def test_another_torch_or_number_of_threads_is_another_machine(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"v{rates._FORMAT}" in cache.name
    for holder, name, value in (
        (torch, "get_num_threads", lambda: 99),
        (torch, "__version__", "9"),
    ):
        with monkeypatch.context() as other:
            other.setattr(holder, name, value)
            assert rates.cached(CPU) is None
    assert rates.cached(CPU) == H200


def test_ranks_measure_again_what_is_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of this GPU are gone, one of its neighbour is not."""
    mine, other = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=device.index)
    )
    each = ((mine, 2), (mine, 16), (other, 2))
    for device, ranks in each:
        path = rates._file_of_rank(device, ranks)
        assert path is not None
        path.write_text(json.dumps(asdict(H200)))
    assert [rates.cached_of_rank(*those) for those in each] == [H200] * 3
    rates._forget_of_ranks(mine)
    assert [rates.cached_of_rank(*those) for those in each] == [None, None, H200]


def test_the_disk_of_a_folder(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rates are fields of the machine."""
    path = rates._disk_file(tmp_path)
    assert path is not None and rates.disk_on_file(tmp_path) is None
    names = [f"{name}_gb_s" for name in ("read", "write", "read_both", "write_both")]
    measured = dict(zip(names, (4.0, 3.0, 2.0, 1.0), strict=True))
    path.write_text(json.dumps(measured))
    assert asdict(rates.load_disk(tmp_path)) == measured
    command = ["hardware", "--device", "cpu"]
    assert main([*command, "--disk", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[f"disk_{name}"] for name in names} == measured
    for given, shown in (([], False), (["--disk", str(tmp_path)], True)):
        assert main([*command, *given]) == 0
        assert ("disk_read" in capsys.readouterr().out) == shown
    for text in ("{", '{"read_gb_s": 1.0}', path.read_text().replace("1.0", "-1.0")):
        path.write_text(text)
        assert rates.disk_on_file(tmp_path) is None
    for wrong in (["--disk", str(tmp_path / "absent")], ["--device", "cuda:99"]):
        assert main([*command, *wrong]) == 2


# --- measured


def test_a_machine_is_measured_though_that_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    state, clock = torch.get_rng_state(), time.perf_counter
    with monkeypatch.context() as hurried, pytest.warns(UserWarning, match="XDG_CACHE_HOME"):
        hurried.setattr(time, "perf_counter", lambda: 50 * clock())
        found = rates.load("cpu", again=True)
    assert torch.equal(state, torch.get_rng_state())
    assert found.name == "CPU" and found.sustained <= 1.0
    assert found.update_gb_s <= found.host_memory_gb_s
    for field in fields(Hardware):
        value, name = getattr(found, field.name), field.name
        if name in ("locked_bytes", "matmul8_tflop_s", "network_gb_s") or name.startswith("disk_"):
            assert value is None  # of a folder, of ranks, of a GPU
        else:
            assert name in ("name", "collective_s", "gathers_over_pcie") or value > 0, name
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert rates.cached(CPU) is None


def test_rates_of_a_device_that_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long products get the mean of a clock that swings, not what the last of them got. fp8 is
    measured where a device has it."""
    measuring = probe._Probe(CPU)
    windows_s: Iterator[float] = iter([0.0, 0.1, 0.1, 0.1, 0.3])
    now = [0.0]

    def clock() -> float:
        now[0] += next(windows_s)
        return now[0]

    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", clock)
        found = measuring.sustained_flop_s(torch.float32)
    assert found == pytest.approx(4 * 20 * 6 * 256 * 512 * 1024 / 0.6)
    measuring.cuda = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    capabilities: list[Any] = [(8, 6), (9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[0])
    assert measuring.fp8_tflop_s(64) is None
    capabilities.pop(0)
    fast = measuring.fp8_tflop_s(64)
    assert fast is not None and fast > 0
