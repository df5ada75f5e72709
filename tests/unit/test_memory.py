"""Device and host memory of schedules: against a replay that knows only values and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from megacompile import Options
from megacompile.cost.memory import MemoryKind, MemoryMoment, device_memory
from megacompile.cost.optimizer import OptimizerCost, host_updates
from megacompile.cost.places import host_memory
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import tensors_bytes
from megacompile.ir.values import memory
from tests.planned import built

_COMPUTES = (ops.forward, ops.recompute, ops.backward)


def replay(schedule: Schedule) -> list[int]:
    """Total bytes at each op that makes memory, without the code under test."""
    slots = sum(slot.size_bytes for slot in schedule.slots)
    inputs = sum(_size(n) for n in schedule.forward.find_nodes(op="placeholder"))
    alive: dict[str, int] = {}  # the name of what owns memory -> bytes
    held: dict[str, set[str]] = {}  # owner -> values that name it
    totals = []
    left = [
        _node(n.args[0])
        for graph in schedule.graphs.values()
        for n in ops.nodes_of(graph, ops.defer_free)
    ]
    deferred = {memory(node).name: max(_size(node), _size(memory(node))) for node in left}
    before = sum(deferred.values())
    borrowed = {n.name for n in schedule.forward.find_nodes(op="placeholder")}

    def own(name: str, owner: str, size: int) -> None:
        if name not in borrowed:
            alive.setdefault(owner, size)
            held.setdefault(owner, set()).add(name)

    def drop(name: str) -> None:
        for owner in list(held):
            held[owner].discard(name)
            if not held[owner]:
                del held[owner], alive[owner]

    for graph_name, graph in schedule.graphs.items():
        if graph_name == "backward":
            given = graph.find_nodes(op="placeholder")
            wanted = {n.name for n in given}
            for name in [n for names in list(held.values()) for n in names]:
                if name not in wanted:
                    drop(name)
            for node in given:
                owner = next((o for o in held if node.name in held[o]), node.name)
                own(node.name, owner, _size(node))
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in _COMPUTES:
                items = list(ops.items(node))
                extra = sum(_size(item) for _, item in items)
                totals.append(slots + inputs + before + sum(alive.values()) + extra)
                for _, item in items:
                    own(item.name, item.name, _size(item))
            elif ops.effects(node).owns:
                owner = memory(node).name  # which may stand for what an earlier graph has left
                owner = next((o for o in held if owner in held[o]), owner)
                own(node.name, owner, _size(node))
                alive[owner] = max(alive[owner], _size(node))  # an update adds new parameters
                totals.append(slots + inputs + before + sum(alive.values()))
            elif node.target is ops.free:
                drop(_node(node.args[0]).name)
            elif node.target in (ops.defer_free, ops.drain):
                before = 0
    return totals


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _size(node: fx.Node) -> int:
    return tensors_bytes(node.meta.get("value"))


SPECS: list[dict[str, Any]] = [
    {"stages": 6, "slots": 3, "reuse": True},
    {"stages": 6, "keep": {0, 2, 5}},
    {"accumulate": True},
    {"inductor": True},
    {"update": True, "compute_dtype": torch.bfloat16, "stages": 5},
    {"changes": {1}, "random": {2}},
    {"reads": {3: "3 0"}},
    {"training": False},
    {"device_update": {0, 2}, "helps": True},
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_schedules_match_the_replay(spec: dict[str, Any]) -> None:
    schedule = built(**spec)
    found = [moment.total_bytes for moment in device_memory(schedule).moments]
    assert found == replay(schedule)


def moment(schedule: Schedule, graph: str, label: str) -> MemoryMoment:
    moments = device_memory(schedule).moments
    return next(m for m in moments if (m.graph, m.label) == (graph, label))


def test_what_a_backward_leaves_lives_until_a_forward_drains_it() -> None:
    """States of a bucket whose copy the next forward need not wait for; of two graphs: the later
    one's backward runs first, and both have deferred at the end."""
    schedule = built(update=True)
    backward = schedule.graphs["backward"]
    values = [ops.arguments(n)[0] for n in ops.nodes_of(backward, ops.defer_free)]
    deferred = sum(_size(value) for value in values if value.target is ops.update)
    moments = device_memory([schedule, schedule]).moments
    forwards = [m.live_bytes[MemoryKind.STATES] for m in moments if m.graph == "forward"]
    assert deferred > 0 and forwards == [2 * deferred] * 3 + [0] * 5
    found = [m for m in moments if (m.graph, m.label) == ("backward", "3RECOMPUTE")]
    states = [m.live_bytes[MemoryKind.STATES] for m in found]
    assert states == [states[0], deferred + states[0]], "the second's new ones"


def test_slots_are_shared_by_captured_graphs() -> None:
    schedule = built(slots=3)
    both = device_memory([schedule, schedule])
    assert both.moments[0].live_bytes[MemoryKind.SLOTS] == 3 * schedule.buckets[0].size_bytes
    # the first graph's activations wait for the second one's backward
    one = moment(schedule, "backward", "3RECOMPUTE").live_bytes[MemoryKind.ACTIVATIONS]
    boundary = next(m for m in both.moments if m.label == "3RECOMPUTE")
    assert boundary.live_bytes[MemoryKind.ACTIVATIONS] == 2 * one


# --- the host


P, G, S, M = MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.STATES, MemoryKind.MASTERS
NARROW = OptimizerCost(master_bytes=4.0, grad_bytes=2.0)
COSTS: list[tuple[OptimizerCost | None, dict[MemoryKind, int], int]] = [
    # bytes of a bf16 parameter on the host, and moved in its update
    (None, {P: 2, G: 2}, 0),
    (OptimizerCost(), {P: 2, G: 2, S: 4}, 14),
    (OptimizerCost(states=0), {P: 2, G: 2}, 6),
    (OptimizerCost(state_bytes=4.0), {P: 2, G: 2, S: 8}, 22),
    (OptimizerCost(state_bytes=4.0, in_backward=True), {P: 2, S: 8}, 0),
    (NARROW, {P: 2, M: 4, G: 2, S: 8}, 28),  # 12 read and written, 2 + 2
    (OptimizerCost(master_bytes=4.0), {P: 2, M: 4, G: 4, S: 8}, 30),
]


@pytest.mark.parametrize(("cost", "expected", "moved"), COSTS)
def test_host_bytes_a_parameter(
    cost: OptimizerCost | None, expected: dict[MemoryKind, int], moved: int
) -> None:
    schedule = built(update=cost is not None and cost.in_backward, dtype=torch.bfloat16)
    numel = sum(p.numel for b in schedule.buckets for p in b.params)
    found = host_memory(schedule, cost)
    assert {kind: n for kind, n in found.items() if n} == {
        k: n * numel for k, n in expected.items()
    }
    assert set(host_memory(built(training=False, dtype=torch.bfloat16), cost)) <= {P, M}
    if cost is not None:
        updates = host_updates(schedule, cost)
        assert [u.bucket.label for u in updates] == (["0", "1", "2", "3"] if moved else [])
        assert all(u.size_bytes == u.numel * moved for u in updates)


def test_costs_follow_the_options() -> None:
    given: list[tuple[dict[str, Any], OptimizerCost]] = [
        ({}, OptimizerCost()),
        ({"state_dtype": "int8"}, OptimizerCost(state_bytes=1 + 1 / 64, arithmetic_s=2.5)),
        ({"stochastic_rounding": True}, OptimizerCost(arithmetic_s=0.8)),
        ({"compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}, NARROW),
    ]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for options, expected in given:
        assert OptimizerCost.of(Options.resolve(device="cpu", **options)) == expected
        in_backward = Options.resolve(device="cpu", optimizer=optimizer, **options)
        found = OptimizerCost.of(in_backward, states=1)
        assert found.in_backward and found.arithmetic_s == 0.0 and found.states == 1
