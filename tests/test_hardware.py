"""Machines: given by name, changed, measured once and kept in a file."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacompile import compat
from megacompile.cli import main
from megacompile.cost import disk, probe, rates
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.known import known
from megacompile.cost.sheets import NAMES
from megacompile.errors import OptionError
from megacompile.host_memory import total_bytes
from megacompile.plan import scenario


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measure little, and keep it in a folder of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(probe, "_SUSTAINED_S", 0.001)
    monkeypatch.setattr(disk, "_FILE_BYTES", 2**20)
    return tmp_path / "megacompile"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "this"])
def test_known_machines_are_whole(name: str) -> None:
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
    if found.matmul8_tflop_s is not None:
        assert found.matmul8_tflop_s == pytest.approx(2 * found.matmul_tflop_s, rel=0.01)


def test_faster_machines_have_greater_figures() -> None:
    order = [known(name) for name in ("h200", "h100", "a100", "3090", "3080")]
    for rate in ("matmul_tflop_s", "memory_gb_s", "h2d_gb_s", "host_memory_gb_s"):
        rates = [getattr(machine, rate) for machine in order]
        assert rates == sorted(rates, reverse=True), rate


def test_unknown_machines_are_refused() -> None:
    with pytest.raises(OptionError, match="got 'h300'; needed one of h200, h100, a100, 4090"):
        known("h300")


def test_replace_gives_another_machine() -> None:
    changed = H200.replace(host_bytes=2**40, launch_s=0.0)
    assert (changed.host_bytes, changed.launch_s, changed.name) == (2**40, 0.0, "NVIDIA H200")
    assert H200.host_bytes is None
    assert changed.replace(host_bytes=None).host_bytes is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"host_gib": 1}, "got 'host_gib'; needed one of name, h2d_gb_s"),
        ({"h2d_gb_s": 0.0}, "got h2d_gb_s=0.0; needed a positive number"),
        ({"device_bytes": -1}, "got device_bytes=-1"),
        ({"copy_s": float("nan")}, "got copy_s=nan"),
    ],
)
def test_replace_refuses(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(OptionError, match=fault):
        H200.replace(**changes)


def test_hardware_is_measured_once(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rates.load("cpu")
    with monkeypatch.context() as patched:
        patched.setattr(rates, "measure", lambda device: pytest.fail("measured twice"))
        assert rates.load("cpu") == first
    for field in fields(Hardware):
        value = getattr(first, field.name)
        if field.name == "locked_bytes" or field.name.startswith("disk_"):
            assert value is None  # that is of a folder, or found when memory is locked
        elif field.name == "matmul8_tflop_s":
            assert value is None  # a CPU's products of fp8 are no measure
        elif field.name == "network_gb_s":
            assert value is None  # ranks measure it together
        else:
            unset = ("name", "collective_s", "gathers_over_pcie")
            assert field.name in unset or value > 0, field.name
    assert first.sustained <= 1.0
    assert first.update_gb_s <= first.host_memory_gb_s


def test_products_for_long_get_the_mean_of_a_clock_that_swings(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the last of them got: an H100's clock is at its lowest a second after the first."""
    monkeypatch.setattr(probe, "_SUSTAINED_S", 4 * 0.5)  # a CPU takes a quarter of it
    windows_s = iter([0.0, 0.1, 0.1, 0.1, 0.3])
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += next(windows_s)
        return now

    monkeypatch.setattr(probe, "time", mock.Mock(perf_counter=clock))
    operations = 4 * 20 * 6 * 256 * 512 * 1024
    found = probe._Probe(torch.device("cpu")).sustained_flop_s(torch.float32)
    assert found == pytest.approx(operations / 0.6)


def test_what_was_measured_beside_something_else_is_measured_again(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = rates.load("cpu")
    slow = first.replace(matmul_tflop_s=first.matmul_tflop_s / 1000)
    (path,) = quick.iterdir()
    path.write_text(json.dumps(asdict(slow)))
    assert main(["hardware", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matmul_tflop_s"] == slow.matmul_tflop_s
    assert main(["hardware", "--device", "cpu", "--again", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["matmul_tflop_s"] > slow.matmul_tflop_s
    assert asdict(rates.load("cpu")) == found, "and that is kept"


def test_ranks_measure_again_what_is_measured_again(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of this GPU are gone, one of its neighbour is not."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: mock.Mock(uuid=f"uuid-{device.index}"),
    )
    monkeypatch.setattr(rates, "measure", lambda device: H200)
    quick.mkdir()
    mine = [rates._file_of_rank(device, ranks) for ranks in (2, 16)]
    other = rates._file_of_rank(torch.device("cuda", 1), 2)
    for path in (*mine, other):
        assert path is not None
        path.write_text(json.dumps(asdict(H200)))
    rates.load(device)
    assert rates.cached_of_rank(device, 2) == H200
    rates.load(device, again=True)
    assert rates.cached_of_rank(device, 2) is rates.cached_of_rank(device, 16) is None
    assert rates.cached_of_rank(torch.device("cuda", 1), 2) == H200
    assert rates.cached(device) == H200


def test_this_is_the_machine_at_hand(quick: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert known("this") == rates.load(device)


@pytest.mark.parametrize("content", ["", "{", '{"name": "old"}', '{"unknown": 1}', "[1]"])
def test_a_file_that_cannot_be_read_is_written_anew(quick: Path, content: str) -> None:
    rates.load("cpu")
    (path,) = quick.iterdir()
    path.write_text(content)
    found = rates.load("cpu")
    assert json.loads(path.read_text()) == asdict(found)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "fast", None, True, [1.0]])
@pytest.mark.parametrize("figure", ["h2d_gb_s", "matmul_tflop_s", "memory_gb_s"])
def test_figures_that_are_none_are_not_taken(quick: Path, figure: str, value: Any) -> None:
    path = rates._file(torch.device("cpu"))
    assert path is not None
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(H200)))
    assert rates.cached(torch.device("cpu")) == H200
    path.write_text(json.dumps({**asdict(H200), figure: value}))
    assert rates.cached(torch.device("cpu")) is None


def test_a_fifo_is_not_waited_for(quick: Path) -> None:
    rates.load("cpu")
    (path,) = quick.iterdir()
    path.unlink()
    os.mkfifo(path)
    found = rates.load("cpu")
    assert path.is_file() and rates.cached(torch.device("cpu")) == found


def test_without_a_place_to_keep_them(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="megacompile: .*set XDG_CACHE_HOME"):
        assert rates.load("cpu").name == "CPU"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert rates.cached(torch.device("cpu")) is None
    with pytest.warns(UserWarning, match="no home directory"):
        assert rates.load("cpu").name == "CPU"


def test_another_torch_format_or_number_of_threads_measures_again(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates.load("cpu")
    monkeypatch.setattr(torch, "__version__", "9.9")
    rates.load("cpu")
    monkeypatch.setattr(rates, "_FORMAT", rates._FORMAT + 1)
    rates.load("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)  # the host's rates depend on them
    rates.load("cpu")
    names = sorted(path.name for path in quick.iterdir())
    assert len(names) == 4
    assert sum("torch-9.9" in name for name in names) == 3


def test_host_memory_is_found() -> None:
    found = total_bytes()
    assert found is None or 2**28 < found < 2**50


def test_command_line_prints_rates(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "CPU"
    assert main(["hardware", "--device", "cpu"]) == 0
    assert "GB/s" in capsys.readouterr().out
    assert main(["hardware", "--device", "cuda:99"]) == 2
    assert "cuda:99" in capsys.readouterr().err


def test_disk_rates_are_fields_of_the_machine(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hardware", "--device", "cpu", "--disk", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [name for name in found if name.startswith("disk_")]
    assert len(names) == 4 and all(found[name] > 0 for name in names)
    assert found["disk_read_both_gb_s"] <= found["disk_read_gb_s"]
    assert found["disk_write_both_gb_s"] <= found["disk_write_gb_s"]
    assert main(["hardware", "--device", "cpu", "--disk", str(tmp_path)]) == 0
    assert "disk_read" in capsys.readouterr().out
    assert main(["hardware", "--device", "cpu"]) == 0
    assert "disk" not in capsys.readouterr().out


def test_a_disk_is_measured_once(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rates.load_disk(tmp_path)
    monkeypatch.setattr(rates, "measure_disk", lambda folder: pytest.fail("measured twice"))
    assert rates.load_disk(tmp_path) == first
    (path,) = quick.glob("disk-*")
    for text in ("{", '{"read_gb_s": 1.0}', path.read_text().replace("0", "-1")):
        path.write_text(text)
        with pytest.raises(pytest.fail.Exception):
            rates.load_disk(tmp_path)


def test_a_disk_that_is_none(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent")
    assert main(["hardware", "--device", "cpu", "--disk", absent]) == 2
    assert "no file can be made there" in capsys.readouterr().err


def test_fp8_is_measured_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_COPY_BYTES", 2**16)
    measuring = probe._Probe(torch.device("cpu"))
    measuring.cuda = True
    monkeypatch.setattr(measuring, "_wait", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert measuring.fp8_tflop_s(64) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with mock.patch.object(compat, "SCALED_MM", wraps=compat.SCALED_MM) as product:
        found = measuring.fp8_tflop_s(64)
    assert found is not None and found > 0
    for factor in product.call_args.args[:2]:
        assert factor.float().unique().numel() > 50, "not ones, which take less power"


def test_faster_computing_is_faster_in_fp8_too() -> None:
    assert scenario.faster(H200, "compute", 2.0).matmul8_tflop_s == 2 * 1609.0
    assert scenario.faster(known("a100"), "compute", 2.0).matmul8_tflop_s is None
