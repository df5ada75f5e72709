"""The pass that reads states from a disk and writes them back, and what is proved of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from megacompile import megacompile, schedules, trace
from megacompile.cost.hardware import H200
from megacompile.cost.memory import Kind, host_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.text import format_bytes
from megacompile.verify.proof import HazardKind, hazards, verify

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]


@pytest.fixture(params=[False, True], ids=["exact", "in the backward"])
def schedule(request: pytest.FixtureRequest, tmp_path: Path) -> Schedule:
    return made(tmp_path, in_backward=request.param)


def made(folder: Path | None, *, in_backward: bool) -> Schedule:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"optimizer": optimizer} if in_backward else {}
    megacompile(model, device="cpu", lowering="eager", disk=folder, **options)
    model(torch.randn(2, 8)).sum().backward()
    return schedules(model)[0]


def test_what_it_inserts(tmp_path: Path) -> None:
    exact = made(tmp_path, in_backward=False)
    assert exact.update is not None
    assert ops.actions(exact.update) == (
        "0READ_STATE 1READ_STATE 2READ_STATE 0UPDATE 0WRITE_STATE 3READ_STATE 1UPDATE 1WRITE_STATE "
        "2UPDATE 2WRITE_STATE 3UPDATE 3WRITE_STATE"
    )
    inside = made(tmp_path, in_backward=True)
    assert inside.backward is not None
    found = [a for a in ops.actions(inside.backward).split() if "STATE" in a or "UPDATE" in a]
    of_3 = [a for a in found if a.startswith("3")]
    assert of_3 == ["3READ_STATE", "3FETCH_STATE", "3UPDATE", "3OFFLOAD_STATE", "3WRITE_STATE"]
    reads = [a for a in found if "READ" in a]
    assert reads == ["3READ_STATE", "2READ_STATE", "1READ_STATE", "0READ_STATE"]
    assert found.index("1READ_STATE") < found.index("3FETCH_STATE")  # two uses ahead


def test_without_a_disk_nothing_is_inserted() -> None:
    for in_backward in (False, True):
        schedule = made(None, in_backward=in_backward)
        assert "READ_STATE" not in str(schedule) and not schedule.plan.on_disk


def test_it_is_shown(schedule: Schedule) -> None:
    table = schedule.table()
    assert "| read" in table.replace("step | read", "| read") and "3WRITE_STATE" in table
    assert "rs3 = read_state(bucket_3, after=(states_3,))" in schedule.code()
    assert "READ_STATE" in schedule.to_dot()


def graph_of(schedule: Schedule) -> fx.Graph:
    graph = schedule.update if schedule.update is not None else schedule.backward
    assert graph is not None
    return graph


def kinds(schedule: Schedule) -> set[HazardKind]:
    return {hazard.kind for hazard in hazards(schedule)}


def without(node: fx.Node, gone: fx.Node) -> None:
    after: Any = node.kwargs["after"]
    node.kwargs = {"after": tuple(each for each in after if each is not gone)}


def test_a_use_that_does_not_wait_for_its_read(schedule: Schedule) -> None:
    verify(schedule)
    read, *_ = ops.nodes_of(graph_of(schedule), ops.read_state)
    (reader,) = read.users
    without(reader, read)
    assert HazardKind.NOT_READ in kinds(schedule)


def test_a_write_that_does_not_wait(schedule: Schedule) -> None:
    write, *_ = ops.nodes_of(graph_of(schedule), ops.write_state)
    write.kwargs = {}
    assert HazardKind.NOT_WRITTEN in kinds(schedule)


def test_a_read_that_does_not_wait_for_the_last_write(schedule: Schedule) -> None:
    read, *_ = ops.nodes_of(graph_of(schedule), ops.read_state)
    read.kwargs = {}
    assert HazardKind.READ_TOO_EARLY in kinds(schedule)


def test_a_read_of_another_bucket(schedule: Schedule) -> None:
    first, second, *_ = ops.nodes_of(graph_of(schedule), ops.read_state)
    first.args = second.args
    assert HazardKind.NOT_READ in kinds(schedule)


def test_a_write_that_is_not_returned(schedule: Schedule) -> None:
    graph = graph_of(schedule)
    write, *_ = ops.nodes_of(graph, ops.write_state)
    *others, tokens = ops.returned(graph)
    graph.output_node().args = ((*others, tuple(t for t in tokens if t is not write)),)
    assert HazardKind.WRONG_TOKEN in kinds(schedule)


def test_the_disk_takes_its_time(schedule: Schedule) -> None:
    cost = OptimizerCost(in_backward=schedule.update is None)
    found = {}
    for rate in (None, 1e-4, 1e-5):
        machine = H200.replace(
            disk_read_gb_s=rate,
            disk_write_gb_s=rate,
            disk_read_both_gb_s=rate,
            disk_write_both_gb_s=rate,
        )
        found[rate] = simulate(schedule, machine, optimizer=cost, steps=3)
    size = 2 * 4 * 4 * 72  # two moments of four layers
    stored = [ops.stored_bytes(n) for n in ops.nodes_of(graph_of(schedule), ops.write_state)]
    assert sum(stored) == size
    assert found[None].busy_s(Stream.WRITE) == 0.0
    assert found[1e-5].busy_s(Stream.WRITE) == pytest.approx(size / 1e4, rel=1e-6)
    assert found[1e-5].step_s > 5 * found[1e-4].step_s / 2
    assert found[1e-5].bound in (Stream.READ, Stream.WRITE)


def test_a_read_waits_for_a_set_of_buffers(schedule: Schedule) -> None:
    """And for the graph that it is in: the drive is idle in the forward."""
    cost = OptimizerCost(in_backward=schedule.update is None)
    rates = ("disk_read_gb_s", "disk_write_gb_s", "disk_read_both_gb_s", "disk_write_both_gb_s")
    machine = H200.replace(**dict.fromkeys(rates, 1e-5))
    found = {}
    for sets in (1, 2, 4):
        fewer = replace(schedule, plan=replace(schedule.plan, state_sets=sets))
        found[sets] = simulate(fewer, machine, optimizer=cost, steps=3)
    assert found[1].step_s > 1.5 * found[4].step_s and found[2].step_s >= found[4].step_s
    events = [event for event in found[1].events if event.stream in (Stream.READ, Stream.WRITE)]
    spans = sorted((event.start_s, event.stop_s) for event in events)
    assert all(a[1] <= b[0] * (1 + 1e-9) for a, b in zip(spans, spans[1:], strict=False))


def test_host_memory_and_what_a_step_writes(schedule: Schedule) -> None:
    cost = OptimizerCost(in_backward=schedule.update is None)
    size = 2 * 4 * 72  # two moments of one layer
    sets, pages = schedule.plan.state_sets, 2 * 2 * 4096  # of each, those of a matrix and a bias
    assert sets >= 4 and host_memory(schedule, cost)[Kind.STAGED] == sets * pages
    text = f"each step reads {format_bytes(4 * size)} there and writes as much"
    assert any(text in reason for reason in schedule.plan.reasons)
    assert text in str(schedule)


def test_it_is_traced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    megacompile(model, device="cpu", lowering="eager", disk=tmp_path)
    for _ in range(3):
        with trace(model) as traced:
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
    found = {span.op.name: span for span in traced.spans}
    for k in range(4):
        read, write = found[f"{k}READ_STATE"], found[f"{k}WRITE_STATE"]
        assert read.start_s <= read.stop_s <= write.start_s <= write.stop_s
