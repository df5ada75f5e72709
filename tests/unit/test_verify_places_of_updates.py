"""Faults planted in where an update is made: on the device, of what lives there, beside a disk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.verify.hazard import HazardKind
from megacompile.verify.proof import hazards
from tests.capturing import Captured, capture

ON_DISK = frozenset({2, 4})
Fault = Callable[[Schedule], Schedule | None]


@functools.cache
def captured() -> Captured:
    torch.manual_seed(0)
    layers = (module for _ in range(5) for module in (nn.Linear(4, 4), nn.Tanh()))
    return capture(nn.Sequential(*layers), torch.randn(2, 4))


@functools.cache
def built(kind: str) -> Schedule:
    """Updates on the device, by the host beside a disk, or in the backward with residents."""
    options = {
        "device": {"helps": True, "on_disk": ON_DISK, "device_update": 1.0},
        "host": {"helps": True, "on_disk": ON_DISK},
        "resident": {"update": True, "resident": frozenset({0, 1, 2})},
    }
    schedule = captured().build(**options[kind])  # type: ignore[arg-type]
    assert not hazards(schedule)
    return schedule


def graph(of: fx.Graph | None) -> fx.Graph:
    assert of is not None
    return of


def swap(first: fx.Node, second: fx.Node, *places: int) -> None:
    """Exchange some arguments of two calls."""
    mine, its = list(first.args), list(second.args)
    for place in places:
        mine[place], its[place] = its[place], mine[place]
    first.args, second.args = tuple(mine), tuple(its)


def free_what_is_left(schedule: Schedule) -> None:
    backward = graph(schedule.backward)
    with backward.inserting_before(backward.output_node()):
        ops.call(backward, ops.free, ops.returned(backward)[1][1], after=())


def swap_states(schedule: Schedule) -> None:
    first, second, *_ = ops.nodes_of(graph(schedule.update), ops.update)
    swap(first, second, 3)


def swap_gradients(schedule: Schedule) -> None:
    first, second, *_ = ops.nodes_of(graph(schedule.update), ops.update)
    swap(first, second, 2)


def states_elsewhere(schedule: Schedule) -> Schedule:
    """States that the device updates lie on the disk."""
    return replace(schedule, plan=replace(schedule.plan, on_disk=ON_DISK | {1}))


def help_waits_for_the_disk(schedule: Schedule) -> None:
    (helps,) = ops.nodes_of(graph(schedule.update), ops.help_host)
    hosts = ops.nodes_of(graph(schedule.update), ops.update_host)
    of_disk = next(node for node in hosts if ops.arguments(node)[0].key in ON_DISK)
    helps.args = ((*ops.arguments(helps)[0], of_disk),)


def in_place(schedule: Schedule) -> list[fx.Node]:
    return ops.nodes_of(graph(schedule.backward), ops.update_in_place)


def before_the_last_reader(schedule: Schedule) -> None:
    (update, *_) = in_place(schedule)
    taken = ops.nodes_of(graph(schedule.backward), ops.resident)
    key = ops.arguments(update)[0].key
    (weights,) = [node for node in taken if ops.arguments(node)[0].key == key]
    update.append(max(weights.users))


def other_gradients(schedule: Schedule) -> None:
    first, second, *_ = in_place(schedule)
    swap(first, second, 1)


def streamed_in_place(schedule: Schedule) -> None:
    (streamed, *_) = ops.nodes_of(graph(schedule.backward), ops.update)
    update = in_place(schedule)[0]
    update.args = (streamed.args[0], *update.args[1:])


def not_updated(schedule: Schedule) -> None:
    update = in_place(schedule)[0]
    update.replace_all_uses_with(update.prev)
    graph(schedule.backward).erase_node(update)


def offloaded(schedule: Schedule) -> None:
    (brought, *_) = ops.nodes_of(graph(schedule.backward), ops.offload_state)
    brought.args = (in_place(schedule)[0].args[0], *brought.args[1:])


FAULTS: list[tuple[str, Fault, set[HazardKind]]] = [
    ("device", free_what_is_left, {HazardKind.DOUBLE_FREE}),
    ("device", swap_states, {HazardKind.WRONG_STATE}),
    ("device", swap_gradients, {HazardKind.WRONG_GRADIENTS}),
    ("device", states_elsewhere, {HazardKind.NOT_READ, HazardKind.NOT_WRITTEN}),
    ("host", help_waits_for_the_disk, {HazardKind.WRONG_HELP}),
    ("resident", before_the_last_reader, {HazardKind.UPDATED_TOO_EARLY}),
    ("resident", other_gradients, {HazardKind.WRONG_GRADIENTS}),
    ("resident", streamed_in_place, {HazardKind.WRONG_UPDATE}),
    ("resident", not_updated, {HazardKind.NOT_UPDATED}),
    ("resident", offloaded, {HazardKind.WRONG_UPDATE}),
]


@pytest.mark.parametrize(("kind", "fault", "found"), FAULTS, ids=[f[1].__name__ for f in FAULTS])
def test_it_is_found(kind: str, fault: Fault, found: set[HazardKind]) -> None:
    broken = built(kind).copy()
    broken = fault(broken) or broken
    assert found <= {hazard.kind for hazard in hazards(broken)}


def test_where_updates_are_made() -> None:
    """The device is not asked for what lies on a disk, and helps with nothing of it."""
    assert built("device").plan.device_update == {0, 1, 3}
    actions = ops.actions(graph(built("device").update)).split()
    assert {"2READ_STATE", "2WRITE_STATE", "3OFFLOAD_STATE"} <= {*actions}
    assert "3READ_STATE" not in actions and "2OFFLOAD_STATE" not in actions
    (helps,) = ops.nodes_of(graph(built("host").update), ops.help_host)
    helped = {ops.arguments(node)[0].key for node in ops.arguments(helps)[0]}
    assert helped.isdisjoint(ON_DISK) and helped
