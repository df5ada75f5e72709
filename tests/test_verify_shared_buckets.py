"""`verify` on schedules of ranks that share buckets: none is wrong, planted faults are found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.verify.proof import HazardKind, hazards
from tests.capturing import Net, capture

X = torch.linspace(-1, 1, 8).view(2, 4)


@functools.cache
def shared(**options: Any) -> Schedule:
    return capture(Net(Net.chain), X, ranks=3).build(**options)


def first(graph: fx.Graph | None, op: Callable[..., Any]) -> fx.Node:
    assert graph is not None
    node, *_ = ops.nodes_of(graph, op)
    return node


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": True, "keep_last": False},
        {"norms": True},
        {"norms": True, "update": True},
        {"reuse": True, "slots": 4},
        {"device_update": 1.0},
        {"activations": "offload", "lookahead": 1},
        {"update": True, "on_disk": frozenset(range(5))},
    ],
    ids=str,
)
def test_what_the_passes_make_is_right(options: dict[str, Any]) -> None:
    schedule = shared(**options)
    assert schedule.backward is not None
    count = len(ops.nodes_of(schedule.backward, ops.backward))
    assert len(ops.nodes_of(schedule.backward, ops.reduce_scatter)) == count
    assert not hazards(schedule)


def found(schedule: Schedule) -> set[tuple[HazardKind, str, str]]:
    return {(hazard.kind, hazard.label, hazard.other) for hazard in hazards(schedule)}


def test_a_stage_that_gets_this_ranks_part_alone() -> None:
    schedule = shared().copy()
    whole = first(schedule.forward, ops.all_gather)
    part = whole.args[2]
    assert isinstance(part, fx.Node)
    whole.replace_all_uses_with(part)
    whole.update_arg(2, part)
    kinds = found(schedule)
    assert (HazardKind.WRONG_WEIGHTS, "0F", "0PREFETCH_SHARD@0") in kinds


def test_a_gather_that_does_not_wait_for_the_part() -> None:
    """It is given that of another bucket."""
    schedule = shared().copy()
    one, other, *_ = ops.nodes_of(schedule.forward, ops.all_gather)
    mine, theirs = one.args[2], other.args[2]
    other.update_arg(2, mine)
    assert any(label == ops.label(other) for _, label, _ in found(schedule))
    del theirs


def test_gradients_that_nobody_averages() -> None:
    """The collective is gone, with its buffer."""
    schedule = shared().copy()
    backward = schedule.backward
    assert backward is not None
    mean = first(backward, ops.reduce_scatter)
    own, buffer = mean.args[1], mean.args[2]
    assert isinstance(own, fx.Node) and isinstance(buffer, fx.Node)
    for free in [n for n in own.users if n.target is ops.free]:
        backward.erase_node(free)
    mean.replace_all_uses_with(own)
    for node in (mean, *[n for n in buffer.users if n is not mean], buffer):
        backward.erase_node(node)
    assert (HazardKind.WRONG_GRADIENTS, "4OFFLOAD_GRAD", "4B") in found(schedule)


def test_gradients_that_leave_beside_their_mean() -> None:
    schedule = shared().copy()
    offload = first(schedule.backward, ops.offload_grad)
    mean = offload.args[1]
    assert isinstance(mean, fx.Node)
    offload.update_arg(1, mean.args[1])
    kinds = found(schedule)
    assert (HazardKind.WRONG_GRADIENTS, "4OFFLOAD_GRAD", "4B") in kinds
    assert (HazardKind.GRADIENTS_LOST, "4REDUCE_SCATTER", "") in kinds
