"""`insert_update_graph`: who updates what in `optimizer.step()`, in which order, behind what."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Plan, Schedule
from megacompile.ir.tokens import token_of
from megacompile.passes.schedule.device_update import insert_device_update
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.offload_grad import offload_gradients
from megacompile.passes.schedule.update_graph import insert_update_graph, rest_of
from megacompile.verify.proof import HazardKind, hazards
from tests.actions import apply, frees, parse, text, waits

LINE = "0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"


def made(
    line: str = LINE,
    *,
    helps: bool = False,
    on_disk: frozenset[int] = frozenset(),
    **options: Any,
) -> Schedule:
    """What the passes on gradients make; `options`: of the plan, `accumulate`, and of stubs."""
    plan = {key: options.pop(key) for key in ("resident", "device_update") if key in options}
    accumulate = options.pop("accumulate", False)
    schedule = replace(parse(line, **options), plan=Plan(**plan))
    schedule = offload_gradients(schedule, accumulate=accumulate)
    schedule = insert_device_update(schedule, state_bytes=lambda item_bytes: 10.0)
    insert = functools.partial(insert_update_graph, helps=helps, on_disk=on_disk)
    return apply(insert, schedule)


def update_of(schedule: Schedule) -> fx.Graph:
    assert schedule.update is not None
    return schedule.update


def test_the_update_is_the_third_graph() -> None:
    """The docstring's example, without device updates."""
    assert text(made(helps=True)) == (
        "0F 1F 2F | 2B 2OFFLOAD_GRAD 1RECOMPUTE 1B 1OFFLOAD_GRAD 0RECOMPUTE 0B 0OFFLOAD_GRAD | "
        "0UPDATE 1UPDATE 2UPDATE HELP_HOST"
    )


def test_an_update_waits_for_the_gradients_of_its_bucket() -> None:
    graph = update_of(made())
    assert waits(graph) == (
        "0UPDATE(after=gradients_0) 1UPDATE(after=gradients_1) 2UPDATE(after=gradients_2)"
    )
    inputs = graph.find_nodes(op="placeholder")
    tokens = [token_of(node) for node in inputs]
    assert [(token.bucket.label, token.part) for token in tokens if token is not None] == [
        ("0", Part.GRADIENTS),
        ("1", Part.GRADIENTS),
        ("2", Part.GRADIENTS),
    ]
    assert len(inputs) == 3


def test_buckets_come_in_the_order_of_the_forward() -> None:
    """Whatever the order of their gradients; each once, although two stages read it."""
    schedule = made("0F 1F 2F | 2B 1B 0B", reads={0: "0 0.1", 2: "2 0"})
    assert ops.actions(update_of(schedule)) == "0UPDATE 0.1UPDATE 1UPDATE 2UPDATE"


def test_accumulation_changes_nothing_of_it() -> None:
    """What earlier backwards left has been added by the one whose gradients it waits for."""
    assert waits(update_of(made(accumulate=True))) == waits(update_of(made()))


def test_residents_are_updated_where_they_are() -> None:
    graph = update_of(made(resident=frozenset({1}), helps=True))
    assert waits(graph).split(" HELP")[0] == waits(update_of(made()))
    targets = [node.target for node in ops.nodes_of(graph)]
    assert targets == [ops.update_host, ops.update_resident, ops.update_host, ops.help_host]
    (helps,) = ops.nodes_of(graph, ops.help_host)
    assert [ops.label(node) for node in ops.arguments(helps)[0]] == ["0UPDATE", "2UPDATE"]


def test_the_device_does_not_help_where_states_come_from_a_disk() -> None:
    graph = update_of(made(helps=True, on_disk=frozenset({2})))
    (helps,) = ops.nodes_of(graph, ops.help_host)
    assert [ops.label(node) for node in ops.arguments(helps)[0]] == ["0UPDATE", "1UPDATE"]
    alone = update_of(made(helps=True, on_disk=frozenset({0, 1, 2})))
    assert ops.nodes_of(alone, ops.help_host) == []


def test_the_device_helps_only_where_the_host_has_updates() -> None:
    graph = update_of(made(resident=frozenset({0, 1, 2}), helps=True))
    assert ops.actions(graph) == "0UPDATE 1UPDATE 2UPDATE"
    assert ops.nodes_of(update_of(made(helps=False)), ops.help_host) == []


def test_what_the_backward_left_is_updated_on_the_device() -> None:
    """The docstring's example: its states came during the backward, its new ones go to the host."""
    schedule = made(device_update=frozenset({0}), helps=True)
    assert "0FETCH_STATE" in text(schedule)
    graph = update_of(schedule)
    assert waits(graph) == (
        "1UPDATE(after=gradients_1) 2UPDATE(after=gradients_2) HELP_HOST 0UPDATE 0OFFLOAD_STATE"
    )
    (update,) = ops.nodes_of(graph, ops.update)
    bucket, weights, gradients, state = ops.arguments(update)
    assert (bucket.label, weights) == ("0", None)
    assert (gradients.name, state.name) == schedule.left == ("g0_0", "s0")
    assert gradients.op == state.op == "placeholder"
    assert update.meta["value"] == state.meta["value"] is not None
    (offload,) = ops.nodes_of(graph, ops.offload_state)
    assert ops.arguments(offload) == (bucket, update)


def test_a_backward_returns_what_it_leaves() -> None:
    schedule = made(device_update=frozenset({0, 2}))
    assert schedule.backward is not None
    gradients, left, _ = ops.returned(schedule.backward)
    assert [node.name for node in gradients] == ["d0_0"]
    assert tuple(node.name for node in left) == schedule.left == ("g2_2", "s2", "g0_0", "s0")
    assert ops.actions(update_of(schedule)) == (
        "1UPDATE 0UPDATE 0OFFLOAD_STATE 2UPDATE 2OFFLOAD_STATE"
    ), "in the order of the forward"


def test_all_of_it_may_be_left_on_the_device() -> None:
    graph = update_of(made(device_update=frozenset({0, 1, 2}), helps=True))
    assert ops.nodes_of(graph, ops.update_host, ops.help_host) == []


def test_what_an_update_takes_is_freed_behind_the_copies_out_of_it() -> None:
    """Gradients are on their way to the host when the update begins; nobody waits for them here."""
    schedule = insert_free(made(device_update=frozenset({0})))
    assert frees(update_of(schedule)) == (
        "1UPDATE 2UPDATE 0UPDATE -s0 0OFFLOAD_STATE ~new0(after=0OFFLOAD_STATE) "
        "~g0_0(after=gradients_0)"
    )


def test_a_model_that_trains_no_parameter_has_no_update() -> None:
    schedule = parse("0F 1F | 1B 0B")
    stages = tuple(
        replace(stage, template=replace(stage.traced, gradients=stage.traced.gradients[-1:]))
        for stage in schedule.stages
    )
    frozen = replace(schedule, stages=stages)
    assert frozen.gradient_params == {}
    assert insert_update_graph(frozen, helps=True).update is None
    assert insert_update_graph(parse("0F 1F"), helps=True).update is None, "nor has an inference"


def test_a_frozen_bucket_is_not_updated() -> None:
    schedule = parse("0F 1F 2F | 2B 1B 0B")
    stages = [
        replace(stage, template=replace(stage.traced, gradients=stage.traced.gradients[-1:]))
        if stage.index == 1
        else stage
        for stage in schedule.stages
    ]
    graph = update_of(insert_update_graph(replace(schedule, stages=tuple(stages)), helps=True))
    assert ops.actions(graph) == "0UPDATE 2UPDATE HELP_HOST"


def test_the_rest_of_a_step_is_an_update_alone() -> None:
    """Buckets that no schedule trains: their gradients came from elsewhere."""
    buckets = list(parse("0F 1F").buckets)
    schedule = rest_of(buckets, frozenset({buckets[1].key}), helps=True)
    assert ops.actions(update_of(schedule)) == "0UPDATE 1UPDATE HELP_HOST"
    (tokens,) = ops.returned(update_of(schedule))
    assert [ops.label(node) for node in tokens] == ["0UPDATE", "1UPDATE"]
    assert hazards(schedule) == []


def test_the_rest_of_a_step_is_verified() -> None:
    """It must not begin before the gradients are there, nor leave a bucket out."""
    buckets = list(parse("0F 1F").buckets)
    hasty, short = (rest_of(buckets, frozenset(), helps=False) for _ in range(2))
    (first, _) = ops.nodes_of(update_of(hasty), ops.update_host)
    first.kwargs = {}
    assert HazardKind.READ_TOO_EARLY in {hazard.kind for hazard in hazards(hasty)}
    graph = update_of(short)
    graph.output_node().args = (((ops.returned(graph)[0][0],),),)
    graph.erase_node(ops.nodes_of(graph, ops.update_host)[1])
    assert HazardKind.NOT_UPDATED in {hazard.kind for hazard in hazards(short)}


# Gradients do not leave before the last reader of the weights: the update may begin then.


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_leave_behind_the_last_reader_of_the_weights(accumulate: bool) -> None:
    """Bucket 0 gets its last gradients from 1B; 0RECOMPUTE still reads it."""
    line = "0F 1F | 1B 0RECOMPUTE 0B"
    schedule = parse(line, reads={1: "1 0"})
    stages = list(schedule.stages)
    stages[0] = replace(stages[0], template=replace(stages[0].traced, gradients=(1,)))
    schedule = _without_gradients_of_0(replace(schedule, stages=tuple(stages)))
    schedule = offload_gradients(schedule, accumulate=accumulate)
    assert schedule.backward is not None
    shown = waits(schedule.backward).split()
    offload = "0OFFLOAD_GRAD(after=0B)"
    assert offload in shown and shown.index(offload) > shown.index("0B")
    assert "1OFFLOAD_GRAD" in shown and shown.index("1OFFLOAD_GRAD") < shown.index("0RECOMPUTE")


def _without_gradients_of_0(schedule: Schedule) -> Schedule:
    """A backward of stage 0 that gives no gradients of its bucket, as its template says now."""
    assert schedule.backward is not None
    call = ops.calls_by_stage(schedule.backward, ops.backward)[0]
    group = dict(ops.items(call))[1]
    schedule.backward.erase_node(group)
    for graph in schedule.graphs.values():
        for node in ops.nodes_of(graph, ops.forward, ops.recompute, ops.backward):
            stage, *rest = ops.arguments(node)
            node.args = (schedule.stages[stage.index], *rest)
    return schedule
