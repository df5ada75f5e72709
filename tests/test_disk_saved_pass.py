"""The pass that lets saved tensors go on to a disk, what is proved of it, and how many go there."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from megacompile import megacompile, schedules, trace
from megacompile.cost.hardware import H200
from megacompile.cost.memory import Kind, host_memory
from megacompile.cost.simulate import simulate
from megacompile.cost.stored import disk_memory
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.passes.schedule import disk_saved
from megacompile.passes.schedule.disk_saved import insert_disk_saved
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from megacompile.verify.proof import HazardKind, hazards, verify
from tests.capturing import capture
from tests.prove import prove_verify

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

LAYERS = 9
SIZE = 4 * 8 * 16  # bytes of what a layer takes
STORED = 5  # of them are on the disk


@pytest.fixture
def schedule(tmp_path: Path) -> Schedule:
    return made(tmp_path)


def made(folder: Path, **options: Any) -> Schedule:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(8, 8), nn.Tanh())))
    given = {"activations": "offload", "disk": folder, "disk_saved": True, **options}
    megacompile(model, device="cpu", lowering="eager", **given)
    model(torch.randn(16, 8)).sum().backward()
    return schedules(model)[0]


def saved_of(graph: fx.Graph | None) -> str:
    assert graph is not None
    return " ".join(action for action in ops.actions(graph).split() if "SAVED" in action)


def test_what_it_inserts(schedule: Schedule) -> None:
    assert saved_of(schedule.forward) == " ".join(
        f"{k}OFFLOAD_SAVED {k}WRITE_SAVED" for k in range(1, STORED + 1)
    )
    assert saved_of(schedule.backward) == (
        "5READ_SAVED 4READ_SAVED 3READ_SAVED 5FETCH_SAVED 2READ_SAVED 4FETCH_SAVED 1READ_SAVED "
        "3FETCH_SAVED 2FETCH_SAVED 1FETCH_SAVED"
    )
    assert schedule.plan.saved_on_disk == frozenset(range(STORED + 1))
    assert sum(name.endswith("_disk") for name in schedule.saved_values) == STORED


def test_buffers_are_lent_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sets in (1, 2, 3):
        monkeypatch.setattr(disk_saved, "SAVED_SETS", sets)
        schedule = made(tmp_path)
        offloads = ops.nodes_of(schedule.forward, ops.offload_saved)
        after: list[Any] = [each.kwargs.get("after", ()) for each in offloads]
        waits = [[node.name for node in each] for each in after]
        writes = [node.name for node in ops.nodes_of(schedule.forward, ops.write_saved)]
        assert waits == [[]] * sets + [[name] for name in writes[:-sets]]
        assert schedule.plan.saved_sets == sets


def test_it_is_shown(schedule: Schedule) -> None:
    assert "3WRITE_SAVED" in schedule.table() and "3READ_SAVED" in schedule.table()
    assert "y2_0_disk = write_saved(stage_3, y2_0_host)" in schedule.code()
    assert "READ_SAVED" in schedule.to_dot()
    text = f"each step writes {STORED * SIZE / 1024} KiB there and reads it back, by way of 6 "
    assert text in str(schedule)


def test_what_it_takes(schedule: Schedule) -> None:
    assert disk_memory([schedule], _cost())[Kind.ACTIVATIONS] == STORED * 4096
    kinds = host_memory(schedule)
    assert Kind.ACTIVATIONS not in kinds and kinds[Kind.STAGED] == 6 * SIZE


def _cost() -> Any:
    return problem().optimizer


# --- verify


def kinds(schedule: Schedule) -> set[HazardKind]:
    return {hazard.kind for hazard in hazards(schedule)}


def graph_of(schedule: Schedule) -> fx.Graph:
    assert schedule.backward is not None
    return schedule.backward


def test_a_buffer_that_is_taken_too_early(schedule: Schedule) -> None:
    verify(schedule)
    takers = ops.nodes_of(schedule.forward, ops.offload_saved)
    takers += ops.nodes_of(graph_of(schedule), ops.read_saved)
    waiting = [node for node in takers if node.kwargs]
    assert len(waiting) == 2 * (STORED - 3)
    for node in waiting:
        after = node.kwargs
        node.kwargs = {}
        assert kinds(schedule) == {HazardKind.TOO_MANY_BUFFERS}, node.name
        node.kwargs = after
    fewer = replace(schedule, plan=replace(schedule.plan, saved_sets=2))
    assert kinds(fewer) == {HazardKind.TOO_MANY_BUFFERS}


def test_a_fetch_of_another_one(schedule: Schedule) -> None:
    first, second, *_ = ops.nodes_of(graph_of(schedule), ops.fetch_saved)
    stage, _, buffer = ops.arguments(first)
    first.args = (stage, ops.arguments(second)[1], buffer)
    assert {HazardKind.WRONG_BUFFER, HazardKind.WRONG_ARGUMENT} <= kinds(schedule)


def test_a_read_of_another_one(schedule: Schedule) -> None:
    first, second, *_ = ops.nodes_of(graph_of(schedule), ops.read_saved)
    first.args = second.args
    assert {HazardKind.WRONG_BUFFER, HazardKind.WRONG_ARGUMENT} <= kinds(schedule)


def test_a_read_of_what_is_not_written(schedule: Schedule) -> None:
    read, *_ = ops.nodes_of(graph_of(schedule), ops.read_saved)
    other = next(n for n in graph_of(schedule).find_nodes(op="placeholder") if n.name == "t0")
    read.args = (read.args[0], other)
    assert HazardKind.NOT_OFFLOADED in kinds(schedule)


def test_a_fetch_that_leaves_out_the_read(schedule: Schedule) -> None:
    fetch, *_ = ops.nodes_of(graph_of(schedule), ops.fetch_saved)
    stage, read, buffer = ops.arguments(fetch)
    fetch.args = (stage, read.args[1], buffer)
    assert {HazardKind.NOT_OFFLOADED, HazardKind.WRONG_BUFFER} <= kinds(schedule)


def test_a_compute_that_takes_the_copy(schedule: Schedule) -> None:
    fetch, *_ = ops.nodes_of(graph_of(schedule), ops.fetch_saved)
    reader = next(node for node in fetch.users if node.target is ops.recompute)
    on_disk = ops.arguments(fetch)[1].args[1]
    reader.args = (*reader.args[:2], (on_disk,), *reader.args[3:])
    assert HazardKind.ON_HOST in kinds(schedule)


def test_a_write_that_is_not_returned(schedule: Schedule) -> None:
    """Or the copy on the host instead, whose buffer is free by then."""
    write, *_ = ops.nodes_of(schedule.forward, ops.write_saved)
    outputs, saved = ops.returned(schedule.forward)
    for instead in ((), (ops.arguments(write)[1],)):
        new: Any = [v for value in saved for v in (instead if value is write else (value,))]
        new = tuple(new)
        schedule.forward.output_node().args = ((outputs, new),)
        names = tuple(node.name for node in new)
        assert HazardKind.OFFLOAD_LOST in kinds(replace(schedule, saved_values=names))
        assert (HazardKind.WRONG_BUFFER in kinds(schedule)) is bool(instead)


# --- time


def rates(rate: float | None) -> dict[str, Any]:
    both = {"disk_read_both_gb_s": rate, "disk_write_both_gb_s": rate}
    return {"disk_read_gb_s": rate, "disk_write_gb_s": rate, **both}


def test_the_disk_takes_its_time(schedule: Schedule) -> None:
    alone = replace(schedule, update=None)
    found = {r: simulate(alone, H200.replace(**rates(r)), steps=3) for r in (None, 1e-5)}
    assert found[1e-5].busy_s(Stream.WRITE) == pytest.approx(STORED * SIZE / 1e4)
    assert found[1e-5].busy_s(Stream.READ) == pytest.approx(STORED * SIZE / 1e4)
    assert found[None].busy_s(Stream.READ) == 0.0


def test_a_read_begins_behind_its_write(schedule: Schedule) -> None:
    events = simulate(replace(schedule, update=None), H200.replace(**rates(1e-5))).events
    at = {event.label: event for event in events}
    for k in range(1, STORED + 1):
        assert at[f"{k}WRITE_SAVED"].stop_s <= at[f"{k}READ_SAVED"].start_s
        assert at[f"{k}READ_SAVED"].stop_s <= at[f"{k}FETCH_SAVED"].start_s


def test_it_is_traced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    options: dict[str, Any] = {"activations": "offload", "disk": tmp_path, "disk_saved": True}
    megacompile(model, device="cpu", lowering="eager", **options)
    model(torch.randn(16, 8)).sum().backward()
    with trace(model) as traced:
        model(torch.randn(16, 8)).sum().backward()
    found = {span.op.name: span for span in traced.spans}
    for k in (1, 2):
        write, read = found[f"{k}WRITE_SAVED"], found[f"{k}READ_SAVED"]
        assert write.start_s <= write.stop_s <= read.start_s <= read.stop_s


# --- the plan

GIB = 2**30


class Deep(nn.Module):
    """Little to train, and large values between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@cache
def program(disk_saved: bool | None = None, activations: str = "auto") -> AbstractProgram:
    model = Deep().to("meta", torch.bfloat16)
    x = torch.empty(2**18, 512, device="meta", dtype=torch.bfloat16)
    options = replace(
        abstract_options(device="cpu", activations=activations),
        disk="/absent",
        disk_memory=100 * GIB,
        disk_saved=disk_saved,
    )
    hardware = H200.replace(**rates(3.0))
    (found,) = abstract_programs(model, (x,), options=options, hardware=hardware)
    return found


def problem(disk_saved: bool | None = None, activations: str = "auto", **changes: Any) -> Problem:
    made = program(disk_saved, activations)
    planned, compiler = made.planned(), made.compiler
    graphs = compiler.pipeline.differentiated(*planned)
    found = compiler.chooser.problem_of(graphs, planned.variant)
    given = {"budget_bytes": 3 * GIB, "disk_budget_bytes": 100 * GIB, **changes}
    return replace(found, **given)


@pytest.mark.parametrize("activations", ["auto", "offload"])
@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_the_sums_are_those_of_the_cost_model(activations: str, count: int) -> None:
    deep = problem(activations=activations)
    for choice in (Choice(0), Choice(2, offload=12)):
        choice = replace(choice, saved_on_disk=count)
        schedule = deep.schedule(choice)
        exact = sum(host_memory(schedule, deep.optimizer).values())
        assert deep.host_bytes(choice) == pytest.approx(exact, abs=8)
        assert deep.tiers.of_disk(choice) == sum(disk_memory([schedule], deep.optimizer).values())


@pytest.mark.parametrize("reruns", [True, False])
def test_as_little_as_it_takes(reruns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To run stages again is the other way, which is faster here."""
    if not reruns:
        monkeypatch.setattr(Problem, "fewest_reruns", lambda *args: 0)
    plenty = problem(host_budget_bytes=100 * GIB)
    found = search(plenty, resident=False)
    assert found is not None and found.choice.offload and not found.choice.saved_on_disk
    every = frozenset(bucket.key for bucket in plenty.buckets)
    states = plenty.host_bytes(replace(found.choice, on_disk=every))
    deep = problem(host_budget_bytes=int(states - 1.45 * GIB))
    less = search(deep, resident=False)
    assert less is not None and deep.fits_exactly(less.choice)
    if reruns:
        assert less.choice.rerun and not less.choice.saved_on_disk
        return
    assert less.choice.on_disk == every, "states go there first"
    fewer = replace(less.choice, saved_on_disk=less.choice.saved_on_disk - 1)
    assert less.choice.saved_on_disk and not deep.fits_host(fewer)
    assert less.step_s > found.step_s
    assert deep.drafts.of(less.choice).plan.saved_on_disk


def test_it_is_settled() -> None:
    """All states, and then as few saved tensors as it takes; or none, where not even all do."""
    deep = problem(activations="offload")
    every = frozenset(bucket.key for bucket in deep.buckets)
    states = deep.host_bytes(Choice(0, on_disk=every))
    found = []
    for missing in (0.0, 0.3, 1.0, 2.0, 9.0):
        tight = problem(activations="offload", host_budget_bytes=int(states - missing * GIB))
        choice = tight.settled(Choice(0))
        found.append(choice.saved_on_disk)
        if 0 < missing < 9:
            assert choice.on_disk == every and tight.fits_host(choice)
    assert found[0] == found[-1] == 0 and 0 < found[1] < found[2] < found[3] < 20
    never = problem(False, "offload", host_budget_bytes=int(states - GIB))
    assert not never.settled(Choice(0)).saved_on_disk and not never.fits_host(
        never.settled(Choice())
    )
    small = problem(activations="offload", host_budget_bytes=states - GIB, disk_budget_bytes=GIB)
    assert not small.fits_host(small.settled(Choice(0)))


def test_all_of_it_where_that_is_asked_for() -> None:
    deep = problem(True, "offload")
    schedule = deep.schedule(Choice(0))
    assert schedule.plan.saved_on_disk == schedule.plan.offload
    exact = sum(host_memory(schedule, deep.optimizer).values())
    assert deep.host_bytes(Choice(0)) == pytest.approx(exact, abs=8)
    assert insert_disk_saved(schedule, count=0) is schedule


def test_mutants_are_found() -> None:
    """Each mutant that can give another result, or raise, is reported."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(7) for m in (nn.Linear(4, 4), nn.Tanh())))
    captured = capture(model, torch.randn(2, 4))
    originals = [
        captured.build(activations="offload", disk_saved=True, lookahead=1, slots=slots)
        for slots in (2, 3)
    ]
    assert all(len(schedule.plan.saved_on_disk) > 3 for schedule in originals)
    found = prove_verify(120, 0, originals)
    assert not found.missed and not found.false_alarms, str(found)
