"""The predicted timeline: on schedules whose times can be worked out by hand, and on a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from megacompile import hardware, megacompile, ops, schedules
from megacompile.cli import main
from megacompile.hardware import H200, Hardware
from megacompile.ir import Bucket, Code, Schedule, Slot, Stream
from megacompile.simulate import simulate, work_of

UNIT = Hardware("unit", 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0)  # 2 GB/s alone, 1 GB/s together


def gigabytes(key: int, size: float) -> Bucket:
    return Bucket(key, f"b{key}", (), int(size * 1e9), str(key))


def copies(*sizes: float) -> Schedule:
    """A forward that only prefetches, one bucket of each size in GB."""
    graph = fx.Graph()
    start = ops.call(graph, ops.begin, name="start")
    for i, size in enumerate(sizes):
        ops.call(graph, ops.prefetch, gigabytes(i, size), Slot(i, 0), name=f"w{i}", after=(start,))
    graph.output(((), ()))
    return Schedule("copies", graph, None, ())


def test_copies_of_one_direction_follow_one_another() -> None:
    timeline = simulate(copies(2.0, 4.0), UNIT)
    assert [(e.label, e.start_s, e.stop_s) for e in timeline.events[1:]] == [
        ("0PREFETCH@0", 0.0, 1.0),
        ("1PREFETCH@1", 1.0, 3.0),
    ]
    assert timeline.total_s == 3.0
    assert timeline.bound is Stream.H2D


def test_both_directions_share_the_bandwidth_while_both_run() -> None:
    schedule = copies(2.0)
    graph = schedule.forward
    with graph.inserting_before(graph.output_node()):
        room = ops.call(graph, ops.alloc_grad, gigabytes(9, 1.0), name="room")
        room.meta["value"] = (_floats(0.5),)  # 0.5 GB
        ops.call(graph, ops.offload_grad, gigabytes(9, 0.5), room, name="o")
    timeline = simulate(schedule, UNIT)
    times = {e.label: e.stop_s for e in timeline.events}
    # 0.5 s together move 0.5 GB each way; the other 1.5 GB go at 2 GB/s
    assert times["9OFFLOAD_GRAD"] == pytest.approx(0.5)
    assert times["0PREFETCH@0"] == pytest.approx(0.5 + 0.75)


def _floats(gb: float) -> object:
    from megacompile.ir import TensorMeta

    count = int(gb * 1e9 / 4)
    return TensorMeta((count,), torch.float32, (1,))


def trained() -> Schedule:
    model = megacompile(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), device="cpu")
    model(torch.randn(8, 32)).sum().backward()
    return schedules(model)[0]


def test_work_of_a_linear_layer_is_its_matrix_products() -> None:
    stage = trained().stages[1]
    product = 2 * 8 * 32 * 32
    assert work_of(stage.traced, Code.FORWARD)[0] == product
    assert work_of(stage.traced, Code.BACKWARD)[0] == 2 * product


def test_every_op_runs_once_and_after_what_it_waits_for() -> None:
    schedule = trained()
    timeline = simulate(schedule, H200)
    for name, graph in schedule.graphs.items():
        nodes = ops.nodes_of(graph)
        events = [e for e in timeline.events if e.graph == name]
        assert sorted(e.label for e in events) == sorted(map(ops.label, nodes))
        for stream in Stream:
            own = sorted((e for e in events if e.stream is stream), key=lambda e: e.stop_s)
            assert all(a.stop_s <= b.start_s for a, b in zip(own, own[1:], strict=False))
    assert timeline.total_s == max(e.stop_s for e in timeline.events)


def test_a_slower_bus_makes_the_step_bound_by_copies() -> None:
    schedule = trained()
    slow = replace(H200, h2d_gb_s=1e-3, h2d_both_gb_s=1e-3)
    assert simulate(schedule, slow).bound is Stream.H2D
    assert simulate(schedule, slow).total_s > simulate(schedule, H200).total_s
    assert "bound by h2d" in str(simulate(schedule, slow))


def test_hardware_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "_COPY_BYTES", 2**16)
    first = hardware.load("cpu")
    monkeypatch.setattr(hardware, "measure", lambda device: pytest.fail("measured twice"))
    assert hardware.load("cpu") == first
    assert first.h2d_gb_s > 0 and first.matmul_tflop_s > 0


def test_command_line_prints_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "_COPY_BYTES", 2**16)
    assert main(["hardware", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "CPU"
    assert main(["hardware", "--device", "cpu"]) == 0
    assert "GB/s" in capsys.readouterr().out
    assert main(["hardware", "--device", "cuda:99"]) == 2
    assert "cuda:99" in capsys.readouterr().err
