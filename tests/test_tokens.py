"""`insert_tokens`: who waits for an earlier graph, and what graphs return for later ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Part
from megacompile.ir.tokens import given, take, token_of
from megacompile.passes.schedule.tokens import insert_tokens
from megacompile.show.tokens import writers
from tests import steps
from tests.actions import apply, parse, waits


def inputs(graph: fx.Graph | None) -> list[str]:
    """The tokens that a graph takes, in order."""
    assert graph is not None
    return [node.name for node in graph.find_nodes(op="placeholder") if token_of(node)]


def returned(graph: fx.Graph | None) -> list[str]:
    """The ops whose tokens a graph returns."""
    assert graph is not None
    return [ops.label(node) for node in ops.returned(graph)[-1]]


def waiting(graph: fx.Graph | None) -> dict[str, str]:
    """By the token: who waits for it."""
    assert graph is not None
    found: dict[str, str] = {}
    for node in ops.nodes_of(graph):
        after: Any = node.kwargs.get("after", ())
        found |= {value.name: ops.label(node) for value in after if token_of(value)}
    return found


def test_a_prefetch_waits_for_the_update_of_its_bucket() -> None:
    """The docstring's example; what it waited for before, it still does."""
    schedule = steps.made()
    assert waits(schedule.forward).startswith(
        "BEGIN 0PREFETCH@0(after=weights_0, BEGIN) 1PREFETCH@1(after=weights_1, BEGIN) 0F "
        "2PREFETCH@2(after=weights_2, BEGIN)"
    )
    assert inputs(schedule.forward) == ["weights_0", "weights_1", "weights_2"]
    assert inputs(schedule.backward) == ["weights_2", "weights_1", "weights_0"]


def test_a_forward_returns_no_tokens() -> None:
    outputs, saved_values = ops.returned(steps.made().forward)
    assert [node.name for node in outputs] == ["y2_0"] and len(saved_values) == 4


def test_an_inference_waits_for_updates_too() -> None:
    assert inputs(steps.made("0F 1F").forward) == ["weights_0", "weights_1"]


def test_the_second_prefetch_of_a_bucket_does_not_wait_again() -> None:
    """It is behind the first on its stream."""
    line = "0PREFETCH@0 0F 1PREFETCH@0 1F 0PREFETCH@1 2F"
    schedule = apply(insert_tokens, parse(line, reads={2: "0"}))
    assert waits(schedule.forward) == (
        "0PREFETCH@0(after=weights_0) 0F 1PREFETCH@0(after=weights_1) 1F 0PREFETCH@1 2F"
    )


def test_residents_take_none() -> None:
    """Who updates and who reads them is in order on the compute stream."""
    schedule = steps.made(resident=frozenset({1}))
    assert inputs(schedule.forward) == ["weights_0", "weights_2"]
    assert inputs(schedule.update) == ["gradients_0", "gradients_1", "gradients_2"]
    assert returned(schedule.update) == ["0UPDATE", "1UPDATE", "2UPDATE"]


def test_a_backward_returns_who_wrote_the_gradients() -> None:
    schedule = steps.made()
    assert returned(schedule.backward) == ["2OFFLOAD_GRAD", "1OFFLOAD_GRAD", "0OFFLOAD_GRAD"]
    assert schedule.backward is not None
    assert {part for _, part in given(schedule.backward)} == {Part.GRADIENTS}
    gradients, left, _ = ops.returned(schedule.backward)
    assert [node.name for node in gradients] == ["d0_0"] and left == ()


def test_an_update_returns_who_wrote_weights_and_states() -> None:
    schedule = steps.made(device_update=frozenset({0}))
    assert schedule.update is not None
    assert returned(schedule.update) == ["1UPDATE", "2UPDATE", "0OFFLOAD_STATE"]
    places = {bucket.key: bucket.label for bucket in schedule.buckets}
    shown = {(places[key], part): ops.label(n) for (key, part), n in given(schedule.update).items()}
    assert shown == {
        (label, part): op
        for label, op in (("0", "0OFFLOAD_STATE"), ("1", "1UPDATE"), ("2", "2UPDATE"))
        for part in (Part.WEIGHTS, Part.STATES)
    }


def test_an_accumulating_backward_waits_for_the_one_before() -> None:
    schedule = steps.made(accumulate=True)
    assert waiting(schedule.backward) == {
        "weights_2": "2PREFETCH@0",
        "gradients_2": "2FETCH_GRAD",
        "weights_1": "1PREFETCH@1",
        "gradients_1": "1FETCH_GRAD",
        "weights_0": "0PREFETCH@2",
        "gradients_0": "0FETCH_GRAD",
    }
    assert returned(schedule.backward) == ["2OFFLOAD_GRAD", "1OFFLOAD_GRAD", "0OFFLOAD_GRAD"]


def test_states_are_fetched_behind_the_update_before() -> None:
    schedule = steps.made(device_update=frozenset({0}))
    assert waiting(schedule.backward)["states_0"] == "0FETCH_STATE"
    assert waiting(schedule.update) == {
        "gradients_1": "1UPDATE",
        "gradients_2": "2UPDATE",
        "gradients_0": "DEFER_FREE",
    }


def test_a_backward_that_updates_gives_the_next_forward_its_tokens() -> None:
    schedule = steps.made(in_backward=True)
    assert schedule.update is None
    assert returned(schedule.backward) == ["2OFFLOAD_STATE", "1OFFLOAD_STATE", "0OFFLOAD_STATE"]
    assert waiting(schedule.backward)["states_1"] == "1FETCH_STATE"
    assert inputs(schedule.forward) == ["weights_0", "weights_1", "weights_2"]


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": True}, {"device_update": frozenset({0, 1})}, {"in_backward": True}],
    ids=str,
)
def test_every_token_of_a_cycle_is_given(options: dict[str, Any]) -> None:
    """What trains in a schedule, that schedule writes: no token stands for nothing for ever."""
    schedule = steps.made(**options)
    written = writers(schedule)
    taken = [
        token
        for graph in schedule.graphs.values()
        for node in graph.find_nodes(op="placeholder")
        if (token := token_of(node))
    ]
    assert taken and all(token.place in written for token in taken)


def test_a_token_is_made_once() -> None:
    schedule = parse("0F 1F")
    (bucket, other) = schedule.buckets
    graph = schedule.forward
    first = take(graph, bucket, Part.WEIGHTS)
    assert take(graph, bucket, Part.WEIGHTS) is first
    assert take(graph, bucket, Part.STATES) is not first
    assert take(graph, other, Part.WEIGHTS) is not first
    names = [node.name for node in graph.find_nodes(op="placeholder")]
    assert names == ["x", "weights_0", "states_0", "weights_1"]


def test_tokens_survive_a_copy() -> None:
    schedule = steps.made()
    assert inputs(schedule.copy().forward) == inputs(schedule.forward)
    assert waits(schedule.copy().forward) == waits(schedule.forward)
