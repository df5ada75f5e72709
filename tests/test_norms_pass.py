"""`insert_norms`: the norms of what leaves a backward, taken while it is on the device."""

from __future__ import annotations

from typing import Any

import pytest

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.norms import insert_norms
from megacompile.verify.proof import hazards
from tests import zoo
from tests.actions import apply, parse, text
from tests.capturing import after_templates, capture


def measured(line: str, **stubs: Any) -> Schedule:
    return apply(insert_norms, parse(line, **stubs))


def values(schedule: Schedule) -> str:
    """What each of the ops takes: "1NORM_GRAD(g1_1) 1OFFLOAD_GRAD(g1_1 n1)"."""
    assert schedule.backward is not None
    nodes = ops.nodes_of(schedule.backward, ops.norm_grad, ops.offload_grad)
    shown = [(n, " ".join(value.name for value in ops.arguments(n)[1:])) for n in nodes]
    return " ".join(f"{ops.label(n)}({names})" for n, names in shown)


def test_norms_are_taken_in_front_of_each_offload() -> None:
    """The docstring's example, twice."""
    schedule = measured("0F 1F | 1B 1OFFLOAD_GRAD 0B 0OFFLOAD_GRAD")
    assert text(schedule) == "0F 1F | 1B 1NORM_GRAD 1OFFLOAD_GRAD 0B 0NORM_GRAD 0OFFLOAD_GRAD"
    assert values(schedule) == (
        "1NORM_GRAD(g1_1) 1OFFLOAD_GRAD(g1_1 n1) 0NORM_GRAD(g0_0) 0OFFLOAD_GRAD(g0_0 n0)"
    )


def test_what_is_measured_is_the_sum() -> None:
    schedule = measured("0F | 0FETCH_GRAD 0B 0ADD_GRAD 0OFFLOAD_GRAD")
    assert text(schedule) == "0F | 0FETCH_GRAD 0B 0ADD_GRAD 0NORM_GRAD 0OFFLOAD_GRAD"
    assert values(schedule) == "0NORM_GRAD(sum0) 0OFFLOAD_GRAD(sum0 n0)"


def test_a_stage_of_several_buckets_has_norms_of_each() -> None:
    schedule = measured("0F | 0B 0OFFLOAD_GRAD 0.1OFFLOAD_GRAD", reads={0: "0 0.1"})
    assert values(schedule) == (
        "0NORM_GRAD(g0_0) 0OFFLOAD_GRAD(g0_0 n0) 0.1NORM_GRAD(g0_1_0) 0.1OFFLOAD_GRAD(g0_1_0 n0_1)"
    )


def test_the_norms_of_what_an_update_takes() -> None:
    """The docstring's second example; the norm is of the sum, and of no largest value."""
    line = "0FETCH_GRAD 0FETCH_STATE 0B 0ADD_GRAD 0UPDATE 0OFFLOAD_STATE"
    schedule = measured(f"0F | {line}")
    assert text(schedule) == f"0F | {line.replace('0UPDATE', '0NORM_GRAD 0UPDATE')}"
    assert schedule.backward is not None
    (norm,) = ops.nodes_of(schedule.backward, ops.norm_grad)
    (update,) = ops.nodes_of(schedule.backward, ops.update)
    (offload,) = ops.nodes_of(schedule.backward, ops.offload_state)
    assert norm.args[1] is update.args[2] and norm.args[2] is False
    assert offload.args[1:] == (update, norm)


@pytest.mark.parametrize("line", ["0F 1F", "0F 1F | 1B 0B"])
def test_without_offloads_nothing_changes(line: str) -> None:
    assert text(measured(line)) == line


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("made", [zoo.stack, zoo.tied, zoo.shared, zoo.frozen])
def test_the_whole_pipeline_with_norms_is_safe(made: Any, accumulate: bool) -> None:
    model, inputs = made()
    schedule = capture(model, **inputs).build(norms=True, accumulate=accumulate)
    assert hazards(schedule) == []
    assert schedule.backward is not None
    offloads = ops.nodes_of(schedule.backward, ops.offload_grad)
    assert offloads and all(len(ops.arguments(node)) == 3 for node in offloads)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("made", [zoo.stack, zoo.tied, zoo.shared, zoo.frozen])
def test_updates_with_norms_are_safe(made: Any, accumulate: bool) -> None:
    model, inputs = made()
    schedule = capture(model, **inputs).build(norms=True, update=True, accumulate=accumulate)
    assert hazards(schedule) == []
    assert schedule.backward is not None
    offloads = ops.nodes_of(schedule.backward, ops.offload_state)
    assert offloads and all(len(ops.arguments(node)) == 3 for node in offloads)


def test_a_chain_with_norms() -> None:
    """With the passes behind it: the norms are freed with the gradients."""
    schedule = parse("0F 1F")
    for function in after_templates(norms=True, lookahead=1).values():
        schedule = apply(function, schedule)
    assert hazards(schedule) == []
    assert text(schedule).split(" | ")[1] == (
        "1PREFETCH@0 0PREFETCH@1 1B 1NORM_GRAD 1OFFLOAD_GRAD 0RECOMPUTE 0B 0NORM_GRAD 0OFFLOAD_GRAD"
    )
