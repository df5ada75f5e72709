"""The pass that reads parameters from a disk and writes them back, and what is proved of it."""

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
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.tokens import given
from megacompile.verify.proof import HazardKind, hazards, verify

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

LAYERS = 5
SIZE = 4 * 72  # bytes of a layer's parameters


@pytest.fixture(params=[False, True], ids=["exact", "in the backward"])
def schedule(request: pytest.FixtureRequest, tmp_path: Path) -> Schedule:
    return made(tmp_path, in_backward=request.param)


def made(folder: Path | None, *, in_backward: bool, frozen: int = 0) -> Schedule:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(8, 8), nn.Tanh())))
    for layer in list(model)[: 2 * frozen]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    options: dict[str, Any] = {"optimizer": optimizer} if in_backward else {}
    weights = folder is not None
    megacompile(model, device="cpu", lowering="eager", disk=folder, disk_weights=weights, **options)
    model(torch.randn(2, 8)).sum().backward()
    return schedules(model)[0]


def weights_of(graph: fx.Graph | None, *others: str) -> str:
    assert graph is not None
    wanted = ("WEIGHTS", "TRAINED", *others)
    return " ".join(a for a in ops.actions(graph).split() if any(part in a for part in wanted))


def test_what_it_inserts(tmp_path: Path) -> None:
    exact = made(tmp_path, in_backward=False)
    assert weights_of(exact.forward, "PREFETCH") == (
        "0READ_WEIGHTS 1READ_WEIGHTS 2READ_WEIGHTS 0PREFETCH@0 3READ_WEIGHTS 1PREFETCH@1 "
        "4READ_WEIGHTS 2PREFETCH@2 3PREFETCH@0 4PREFETCH@1"
    )
    assert weights_of(exact.backward, "PREFETCH", "REUSE") == (  # what is reused is not read
        "1READ_WEIGHTS 4REUSE@1 3REUSE@0 2REUSE@2 1PREFETCH@1"
    )
    assert weights_of(exact.update, "UPDATE") == (
        "0READ_TRAINED 1READ_TRAINED 2READ_TRAINED 0UPDATE 0WRITE_WEIGHTS 3READ_TRAINED 1UPDATE "
        "1WRITE_WEIGHTS 4READ_TRAINED 2UPDATE 2WRITE_WEIGHTS 3UPDATE 3WRITE_WEIGHTS 4UPDATE "
        "4WRITE_WEIGHTS"
    )
    inside = made(tmp_path, in_backward=True)
    found = weights_of(inside.backward, "UPDATE", "OFFLOAD").split()
    assert [a for a in found if a.startswith("2")] == [
        "2UPDATE",
        "2OFFLOAD_STATE",
        "2WRITE_WEIGHTS",
    ]


def test_what_is_frozen_is_not_written(tmp_path: Path) -> None:
    for in_backward in (False, True):
        schedule = made(tmp_path, in_backward=in_backward, frozen=3)
        written = [
            ops.arguments(node)[0].label
            for graph in schedule.graphs.values()
            for node in ops.nodes_of(graph, ops.write_weights)
        ]
        assert sorted(written) == ["3", "4"]
        assert len(ops.nodes_of(schedule.forward, ops.read_weights)) == LAYERS


def test_without_it_nothing_is_inserted() -> None:
    schedule = made(None, in_backward=False)
    assert "READ_WEIGHTS" not in str(schedule) and not schedule.plan.weights_on_disk


def test_it_is_shown(schedule: Schedule) -> None:
    assert "3READ_WEIGHTS" in schedule.table() and "3WRITE_WEIGHTS" in schedule.table()
    assert "rw3 = read_weights(bucket_3, after=(weights_3,))" in schedule.code()
    assert "READ_WEIGHTS" in schedule.to_dot()
    assert f"the parameters of {LAYERS} buckets" in str(schedule)


def changing(schedule: Schedule) -> fx.Graph:
    """The graph that changes parameters."""
    graph = schedule.update if schedule.update is not None else schedule.backward
    assert graph is not None
    return graph


def kinds(schedule: Schedule) -> set[HazardKind]:
    return {hazard.kind for hazard in hazards(schedule)}


def without(node: fx.Node, gone: fx.Node) -> None:
    after: Any = node.kwargs["after"]
    node.kwargs = {"after": tuple(each for each in after if each is not gone)}


def reads(schedule: Schedule) -> list[fx.Node]:
    """Every read of parameters."""
    each = (ops.read_weights, ops.read_trained)
    return [node for graph in schedule.graphs.values() for node in ops.nodes_of(graph, *each)]


def test_a_graph_returns_who_wrote_last(schedule: Schedule) -> None:
    last = given(changing(schedule))
    for bucket in schedule.buckets:
        assert last[bucket.key, Part.WEIGHTS].target is ops.write_weights
        assert last[bucket.key, Part.STATES].target is ops.write_state


def test_a_use_that_does_not_wait_for_its_read(schedule: Schedule) -> None:
    verify(schedule)
    for read in reads(schedule):
        (user,) = read.users
        after = user.kwargs
        without(user, read)
        assert {HazardKind.NOT_READ, HazardKind.LEAK} <= kinds(schedule), read.name
        user.kwargs = after
    verify(schedule)


def test_a_read_that_does_not_wait_for_the_last_write(schedule: Schedule) -> None:
    """The other graphs come behind a forward, whose prefetches are done when it returns."""
    for read in ops.nodes_of(schedule.forward, ops.read_weights):
        after = read.kwargs
        read.kwargs = {}
        assert HazardKind.READ_TOO_EARLY in kinds(schedule), read.name
        read.kwargs = after


def test_a_read_of_another_bucket(schedule: Schedule) -> None:
    first, second, *_ = ops.nodes_of(schedule.forward, ops.read_weights)
    first.args = second.args
    assert HazardKind.NOT_READ in kinds(schedule)


def test_two_prefetches_of_one_read(schedule: Schedule) -> None:
    """The first gives the buffer back."""
    fetches = ops.nodes_of(schedule.forward, ops.prefetch)
    first, *_ = ops.nodes_of(schedule.forward, ops.read_weights)
    with schedule.forward.inserting_after(fetches[0]):
        schedule.forward.node_copy(fetches[0])
    assert HazardKind.NOT_READ in kinds(schedule)
    assert len(first.users) == 2


def test_a_write_that_does_not_wait(schedule: Schedule) -> None:
    for write in ops.nodes_of(changing(schedule), ops.write_weights):
        after = write.kwargs
        write.kwargs = {}
        assert HazardKind.NOT_WRITTEN in kinds(schedule), write.name
        write.kwargs = after


def test_a_write_that_comes_twice(schedule: Schedule) -> None:
    write, *_ = ops.nodes_of(changing(schedule), ops.write_weights)
    with write.graph.inserting_after(write):
        write.graph.node_copy(write)
    assert HazardKind.WRONG_UPDATE in kinds(schedule)


@pytest.mark.parametrize("instead", [False, True])
def test_a_write_that_is_not_returned(schedule: Schedule, instead: bool) -> None:
    """Nor is what only brings the parameters to host memory the last to write them."""
    graph = changing(schedule)
    write, *_ = ops.nodes_of(graph, ops.write_weights)
    *others, tokens = ops.returned(graph)
    other = [write.all_input_nodes[0]] if instead else []
    new = (*other, *(token for token in tokens if token is not write))
    graph.output_node().args = ((*others, new),)
    assert HazardKind.WRONG_TOKEN in kinds(schedule)


def test_what_lies_in_memory_is_not_read(schedule: Schedule) -> None:
    plan = replace(schedule.plan, weights_on_disk=frozenset())
    assert HazardKind.WRONG_UPDATE in kinds(replace(schedule, plan=plan))


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
    nodes = [node for graph in schedule.graphs.values() for node in ops.nodes_of(graph)]
    written = [ops.stored_bytes(node) for node in nodes if node.target is ops.write_weights]
    assert sum(written) == LAYERS * SIZE
    states = 2 * LAYERS * SIZE
    assert found[1e-5].busy_s(Stream.WRITE) == pytest.approx((sum(written) + states) / 1e4)
    read = sum(ops.stored_bytes(node) for node in nodes if ops.stream_of(node) is Stream.READ)
    assert found[1e-5].busy_s(Stream.READ) == pytest.approx(read / 1e4)
    assert found[None].busy_s(Stream.READ) == 0.0
    assert found[1e-5].bound in (Stream.READ, Stream.WRITE)


def test_it_is_traced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    megacompile(model, device="cpu", lowering="eager", disk=tmp_path, disk_weights=True)
    for _ in range(3):
        with trace(model) as traced:
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
    found = {span.op.name: span for span in traced.spans}
    for k in range(4):
        read, write = found[f"{k}READ_TRAINED"], found[f"{k}WRITE_WEIGHTS"]
        assert read.start_s <= read.stop_s <= write.start_s <= write.stop_s
        assert f"{k}READ_WEIGHTS" in found
