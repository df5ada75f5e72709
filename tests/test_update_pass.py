"""`insert_updates`: where each bucket is updated, and when its states are fetched for that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.prefetch import insert_prefetch
from megacompile.passes.schedule.update_in_backward import insert_updates
from megacompile.verify.proof import hazards
from tests import zoo
from tests.actions import apply, parse, text
from tests.capturing import Net, after_templates, capture


def updated(
    line: str,
    *,
    accumulate: bool = False,
    lookahead: int = 1,
    masters: bool = False,
    resident: frozenset[int] = frozenset(),
    **stubs: Any,
) -> Schedule:
    function = functools.partial(
        insert_updates,
        accumulate=accumulate,
        lookahead=lookahead,
        masters=masters,
        updated_bytes=lambda item_bytes: 10.0,
        state_bytes=lambda item_bytes: 8.0,
    )
    schedule = parse(line, **stubs)
    plan = replace(schedule.plan, resident=resident)
    return apply(function, replace(schedule, plan=plan))


def backward(line: str, **options: Any) -> str:
    """What the pass makes of a backward."""
    stages = 1 + max(int(word[0]) for word in line.split())
    forward = " ".join(f"{i}F" for i in range(stages))
    schedule = updated(f"{forward} | {line}", **options)
    return text(schedule).partition(" | ")[2]


def values(schedule: Schedule) -> str:
    """What updates and offloads take: "1UPDATE(None g1_1 s1) 1OFFLOAD_STATE(new1)"."""
    assert schedule.backward is not None
    nodes = ops.nodes_of(schedule.backward, ops.update, ops.offload_state)
    shown = [(n, " ".join(map(str, ops.arguments(n)[1:]))) for n in nodes]
    return " ".join(f"{ops.label(n)}({names})" for n, names in shown)


# Where updates are.


def test_each_bucket_is_updated_behind_its_gradients() -> None:
    """The docstring's example; states are fetched when they are needed."""
    assert backward("2B 1B", lookahead=0) == (
        "2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE 1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE"
    )


@pytest.mark.parametrize("line", ["0F 1F", "0F 1F | 1B 0B"])
def test_the_forward_computes_what_it_did(line: str) -> None:
    schedule = updated(line)
    assert ops.actions(schedule.forward).replace(" DRAIN", "") == "0F 1F"
    assert (schedule.backward is None) == ("|" not in line)


@pytest.mark.parametrize("line", ["", "2B 1B 0B"])
def test_a_forward_reclaims_half_way_what_was_parked(line: str) -> None:
    """The docstring's example; one without a backward does it too."""
    schedule = updated(f"0F 1F 2F | {line}" if line else "0F 1F 2F")
    assert ops.actions(schedule.forward) == "0F 1F DRAIN 2F"
    assert ops.actions(updated("0F").forward) == "0F DRAIN"


def test_where_nothing_is_updated_nothing_is_drained() -> None:
    schedule = updated("0F 1F 2F | 2B", frozen=(0, 1))
    assert ops.nodes_of(schedule.forward, ops.drain)  # 2B gives gradients
    model = Net(lambda net, x: cast("Any", net.layers)[0](x).sum(), depth=1).requires_grad_(False)
    schedule = capture(model, torch.ones(2, 4, requires_grad=True)).build(update=True)
    assert schedule.backward is not None
    assert not ops.nodes_of(schedule.forward, ops.drain)


def test_an_update_takes_the_gradients_and_states_of_its_bucket() -> None:
    schedule = updated("0F 1F | 1B 0B")
    assert values(schedule) == (
        "1UPDATE(None g1_1 s1) 1OFFLOAD_STATE(new1) 0UPDATE(None g0_0 s0) 0OFFLOAD_STATE(new0)"
    )


def test_a_shared_bucket_is_updated_behind_its_last_gradient() -> None:
    """A module called twice, tied parameters: the last stage reads the first one's bucket."""
    line = "2B 1B 0B"
    assert backward(line, reads={2: "2 0"}, lookahead=0) == (
        "2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE 1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE "
        "0FETCH_STATE 0B 0UPDATE 0OFFLOAD_STATE"
    )
    assert backward(line, reads={2: "0"}, lookahead=0) == (
        "2B 1FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE 0FETCH_STATE 0B 0UPDATE 0OFFLOAD_STATE"
    )


def test_gradients_of_all_calls_are_in_what_the_update_takes() -> None:
    schedule = updated("0F 1F | 1B 0B", reads={1: "0"})
    assert values(schedule) == "0UPDATE(None g0_0 s0) 0OFFLOAD_STATE(new0)"


def test_an_update_is_behind_the_last_reader_that_gives_no_gradients() -> None:
    """A frozen parameter of the same bucket, which 0B reads for its input's gradient."""
    model = Net(_mixed, depth=2)
    first: Any = model.layers[0]
    first.up.requires_grad_(False)
    first.down.bias.requires_grad_(False)
    x = torch.ones(2, 4, requires_grad=True)
    schedule = capture(model, x).build(update=True, lookahead=1, slots=2)
    assert hazards(schedule) == []
    assert [stage.name for stage in schedule.stages] == ["layers.0", "layers.1", "layers.0"]
    assert not schedule.stages[0].gradient_buckets
    assert text(schedule).partition(" | ")[2] == (
        "1PREFETCH@0 1FETCH_STATE 2B 0PREFETCH@1 0FETCH_STATE 1RECOMPUTE 1B 1UPDATE "
        "1OFFLOAD_STATE 0B 0UPDATE 0OFFLOAD_STATE"
    )


def _mixed(net: Net, x: torch.Tensor) -> torch.Tensor:
    """A frozen part of a layer, another layer, and then the rest of the first one."""
    first, second = cast("Any", net.layers)
    hidden: torch.Tensor = second(first.up(x)[:, :4])
    weight: torch.Tensor = first.down.weight
    return (hidden * weight.sum()).sum()


# Of ranks.


@pytest.mark.parametrize("resident", [frozenset(), frozenset({0, 1, 2})])
def test_ranks_fetch_and_keep_alike_wherever_they_update(resident: frozenset[int]) -> None:
    """Stage 0's backward reads no weights; where nothing is resident, its update gets this rank's
    part with the states. The slot of the others is theirs until they are updated."""
    schedule = updated("0F 1F 2F | 2B 1B 0B", resident=resident, blind=(0,), ranks=2)
    backward = apply(insert_prefetch, schedule).backward
    assert backward is not None
    fetched = {ops.label(node): list(node.users) for node in ops.nodes_of(backward, ops.prefetch)}
    assert list(fetched) == ["2PREFETCH@?", "1PREFETCH@?"]
    updates = ops.nodes_of(backward, ops.update, ops.update_in_place)
    assert [ops.label(node) for node in updates] == ["2UPDATE", "1UPDATE", "0UPDATE"]
    assert [users[-1] for users in fetched.values()] == updates[:2]
    apart = [ops.arguments(node)[2] for node in ops.nodes_of(backward, ops.fetch_state)]
    assert apart == ([] if resident else [False, False, True])


# When states are fetched.


@pytest.mark.parametrize(
    ("lookahead", "after"),
    [
        (
            1,
            "2FETCH_STATE 1FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE "
            "0FETCH_STATE 1B 1UPDATE 1OFFLOAD_STATE 0B 0UPDATE 0OFFLOAD_STATE",
        ),
        (
            2,
            "2FETCH_STATE 1FETCH_STATE 0FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE "
            "1B 1UPDATE 1OFFLOAD_STATE 0B 0UPDATE 0OFFLOAD_STATE",
        ),
    ],
)
def test_states_are_fetched_ahead_in_the_order_of_use(lookahead: int, after: str) -> None:
    assert backward("2B 1B 0B", lookahead=lookahead) == after
    assert backward("2B 1B 0B", lookahead=lookahead + 7).startswith(
        "2FETCH_STATE 1FETCH_STATE 0FETCH_STATE 2B"
    )


def test_a_recompute_and_its_backward_are_one_stage_ahead() -> None:
    assert backward("1RECOMPUTE 1B 0RECOMPUTE 0B", lookahead=0) == (
        "1FETCH_STATE 1RECOMPUTE 1B 1UPDATE 1OFFLOAD_STATE "
        "0FETCH_STATE 0RECOMPUTE 0B 0UPDATE 0OFFLOAD_STATE"
    )


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "reads", [{}, {3: "3 0"}, {3: "0 3", 2: "2 2.1 1"}, {0: "0 0.1 0.2", 3: "0.1"}], ids=str
)
def test_states_come_in_the_order_of_the_updates(
    reads: dict[int, str], accumulate: bool, lookahead: int
) -> None:
    line = "0F 1F 2F 3F | 3B 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    schedule = updated(line, accumulate=accumulate, lookahead=lookahead, reads=reads)
    assert schedule.backward is not None
    in_order = [
        [ops.arguments(node)[0].label for node in ops.nodes_of(schedule.backward, op)]
        for op in (ops.alloc_state, ops.fetch_state, ops.update, ops.offload_state)
    ]
    assert in_order[0] == in_order[1] == in_order[2] == in_order[3]
    assert sorted(in_order[0]) == sorted(bucket.label for bucket in schedule.buckets)


def test_each_fetch_has_a_buffer_of_its_own() -> None:
    for masters in (False, True):
        schedule = updated("0F 1F | 1B 0B", masters=masters)
        assert schedule.backward is not None
        for fetch in ops.nodes_of(schedule.backward, ops.fetch_state):
            bucket, buffer, streamed = ops.arguments(fetch)
            assert ops.arguments(buffer) == (bucket, masters) and streamed is masters
            assert fetch.meta["value"] == buffer.meta["value"]
            fetched = 10 if masters else 8  # bytes of an element: new parameters come later
            assert fetch.meta["value"].size_bytes == fetched * bucket.params[0].numel
        for update in ops.nodes_of(schedule.backward, ops.update):
            assert update.meta["value"].size_bytes == 10 * ops.arguments(update)[0].params[0].numel


# With what is on the host.


def test_gradients_on_the_host_are_added_first() -> None:
    assert backward("1RECOMPUTE 1B 0B", accumulate=True, lookahead=0) == (
        "1FETCH_GRAD 1FETCH_STATE 1RECOMPUTE 1B 1ADD_GRAD 1UPDATE 1OFFLOAD_STATE "
        "0FETCH_GRAD 0FETCH_STATE 0B 0ADD_GRAD 0UPDATE 0OFFLOAD_STATE"
    )
    schedule = updated("0F | 0B", accumulate=True)
    assert values(schedule) == "0UPDATE(None sum0 s0) 0OFFLOAD_STATE(new0)"


# With weights.


def prefetched(line: str, *, masters: bool, **stubs: Any) -> Schedule:
    schedule = updated(line, masters=masters, **stubs)
    return apply(functools.partial(insert_prefetch, lookahead=1), schedule)


@pytest.mark.parametrize(("masters", "weights"), [(False, ["w1", "w0"]), (True, [None, None])])
def test_an_update_reads_the_weights_unless_they_come_with_the_states(
    masters: bool, weights: list[str | None]
) -> None:
    schedule = prefetched("0F 1F | 1B 0B", masters=masters)
    assert schedule.backward is not None
    given = [ops.arguments(n)[1] for n in ops.nodes_of(schedule.backward, ops.update)]
    assert [None if node is None else node.name for node in given] == weights


def test_weights_that_only_the_update_reads_are_fetched_for_it() -> None:
    """An embedding's backward needs no weight, its update does; with masters it does not."""
    line, blind = "0F 1F | 1B 0B", (0,)
    shown = text(prefetched(line, masters=False, blind=blind)).replace("@?", "")
    assert shown.partition(" | ")[2].split(" 1B ")[0] == (
        "1PREFETCH 0PREFETCH 1FETCH_STATE 0FETCH_STATE"
    )
    shown = text(prefetched(line, masters=True, blind=blind)).replace("@?", "")
    assert shown.partition(" | ")[2].split(" 1B ")[0] == "1PREFETCH 1FETCH_STATE 0FETCH_STATE"


# The complete pipeline.

MODELS: list[Callable[[], zoo.Made]] = [
    zoo.stack,
    zoo.batchnorm,
    zoo.dropout,
    zoo.frozen,
    zoo.unused,
    zoo.tied,
    zoo.scaled,
    zoo.shared,
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulate": {"accumulate": True},
    "masters": {"masters": True, "reuse": True, "slots": 4},
    "all": {"accumulate": True, "masters": True, "keep_last": False, "lookahead": 1, "slots": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("made", MODELS)
def test_the_whole_pipeline_with_updates_is_safe(made: Any, options: str) -> None:
    model, inputs = made()
    schedule = capture(model, **inputs).build(update=True, **OPTIONS[options])
    assert hazards(schedule) == []
    graph = schedule.backward
    assert graph is not None
    assert not ops.nodes_of(graph, ops.offload_grad), "gradients stay on the device"
    buckets = {ops.arguments(node)[0].key for node in ops.nodes_of(graph, ops.update)}
    assert buckets == set(schedule.gradient_params) != set()
    assert len(ops.nodes_of(graph, ops.defer_free)) >= 1, "the last ones are not waited for"


@pytest.mark.parametrize("lookahead", [1, 2, 4])
@pytest.mark.parametrize(
    "reads", [{}, {3: "3 0"}, {3: "0", 2: "2 2.1"}, {1: "", 2: "0 2"}], ids=str
)
def test_any_chain_is_safe(reads: dict[int, str], lookahead: int) -> None:
    for options in OPTIONS.values():
        schedule = parse("0F 1F 2F 3F", reads=reads, blind=(0,))
        passes = after_templates(
            **{**options, "update": True, "lookahead": lookahead, "slots": lookahead + 1}
        )
        for function in passes.values():
            schedule = apply(function, schedule)
        assert hazards(schedule) == []
