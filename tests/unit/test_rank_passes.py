"""`insert_reduce_scatter`, `insert_all_reduce`, `insert_all_gather`: what ranks that share buckets
do together."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.all_gather import insert_all_gather
from megacompile.passes.schedule.all_reduce import insert_all_reduce
from megacompile.passes.schedule.delay_reduced import delay_reduced
from megacompile.passes.schedule.norms import insert_norms
from megacompile.passes.schedule.offload_grad import offload_gradients
from megacompile.passes.schedule.reduce_scatter import insert_reduce_scatter
from tests.actions import apply, parse, text


def gathered(line: str, *, ranks: int = 2, **stubs: Any) -> Schedule:
    return apply(insert_all_gather, parse(line, ranks=ranks, **stubs))


def reduced(line: str, *, ranks: int = 2, rank: int = 0, **stubs: Any) -> Schedule:
    function = functools.partial(insert_reduce_scatter, rank=rank)
    return apply(function, parse(line, ranks=ranks, **stubs))


def test_each_fetch_is_of_a_part_and_a_gather_follows() -> None:
    schedule = gathered("0PREFETCH@0 1PREFETCH@1 0F 2PREFETCH@0 1F 2F")
    assert text(schedule) == (
        "0PREFETCH_SHARD@0 0ALL_GATHER@0 1PREFETCH_SHARD@1 1ALL_GATHER@1 0F "
        "2PREFETCH_SHARD@0 2ALL_GATHER@0 1F 2F"
    )


def test_stages_read_what_was_gathered() -> None:
    schedule = gathered("0PREFETCH@0 0F | 0PREFETCH@0 0RECOMPUTE 0B")
    for graph in schedule.graphs.values():
        (part,) = ops.nodes_of(graph, ops.prefetch_shard)
        (whole,) = ops.nodes_of(graph, ops.all_gather)
        assert list(part.users) == [whole]
        readers = ops.nodes_of(graph, ops.forward, ops.recompute)
        assert readers and all(node in whole.users for node in readers)


def test_waits_stay_with_the_copy() -> None:
    line = parse("0PREFETCH@0 0F 1PREFETCH@0 1F", ranks=2)
    forward = line.forward
    _, second = ops.nodes_of(forward, ops.prefetch)
    (reader, _) = ops.nodes_of(forward, ops.forward)
    second.kwargs = {"after": (reader,)}
    schedule = insert_all_gather(line)
    _, part = ops.nodes_of(schedule.forward, ops.prefetch_shard)
    after: Any = part.kwargs["after"]
    assert [node.name for node in after] == [reader.name]
    assert not any("after" in n.kwargs for n in ops.nodes_of(schedule.forward, ops.all_gather))


def copied(line: str, *keys: int, **stubs: Any) -> Schedule:
    schedule = parse(line, ranks=2, **stubs)
    plan = replace(schedule.plan, whole=frozenset(keys))
    return apply(insert_all_gather, replace(schedule, plan=plan))


def test_buckets_that_the_plan_says_are_copied_whole() -> None:
    schedule = copied("0PREFETCH@0 1PREFETCH@1 0F 1F | 1B 0PREFETCH@0 0RECOMPUTE 0B", 0)
    assert text(schedule) == (
        "0PREFETCH_WHOLE@0 1PREFETCH_SHARD@1 1ALL_GATHER@1 0F 1F | "
        "1B 0PREFETCH_WHOLE@0 0RECOMPUTE 0B"
    )


UPDATING = "0F 1F | 1FETCH_STATE 1PREFETCH@0 1B 1REDUCE_SCATTER {}1UPDATE 1OFFLOAD_STATE 0B"


def test_what_is_read_behind_the_sum_of_its_gradients_is_gathered() -> None:
    """Another rank may have taken part in the sum, and updated its rows, by then."""
    found = {}
    for stage in ("", "1PREFETCH@1 0RECOMPUTE "):
        schedule = parse(UPDATING.format(stage), ranks=2, reads={0: "0 1"} if stage else {})
        plan = replace(schedule.plan, whole=frozenset({1}))
        assert schedule.backward is not None
        found[stage] = text(apply(insert_all_gather, replace(schedule, plan=plan)))
    assert "1PREFETCH_WHOLE@0 1B 1REDUCE_SCATTER 1UPDATE" in found[""]
    assert "WHOLE" not in found["1PREFETCH@1 0RECOMPUTE "]


@pytest.mark.parametrize("insert", [gathered, reduced])
def test_without_ranks_the_schedule_is_the_same(insert: Any) -> None:
    line = "0PREFETCH@0 0F | 0B"
    assert text(insert(line, ranks=1)) == line


def test_gradients_are_averaged_behind_each_backward() -> None:
    """The docstring's example."""
    schedule = reduced("0F 1F 2F | 2B 1B 0B")
    assert text(schedule) == ("0F 1F 2F | 2B 2REDUCE_SCATTER 1B 1REDUCE_SCATTER 0B 0REDUCE_SCATTER")


def test_a_shared_bucket_is_averaged_behind_its_last_part() -> None:
    assert text(reduced("0F 1F 2F | 2B 1B 0B", reads={2: "0"})) == (
        "0F 1F 2F | 2B 1B 1REDUCE_SCATTER 0B 0REDUCE_SCATTER"
    )


@pytest.mark.parametrize(
    ("ranks", "rank", "rows"), [(2, 1, 4), (3, 0, 3), (3, 2, 2), (16, 7, 1), (16, 8, 0)]
)
def test_the_mean_has_the_rows_of_its_rank(ranks: int, rank: int, rows: int) -> None:
    """Of 8."""
    schedule = reduced("0F | 0B", ranks=ranks, rank=rank)
    assert schedule.backward is not None
    (mean,) = ops.nodes_of(schedule.backward, ops.reduce_scatter)
    (meta,) = mean.meta["value"]
    assert meta.shape == (rows, 8)


def test_what_follows_takes_the_mean() -> None:
    function = functools.partial(offload_gradients, accumulate=True)
    schedule = function(reduced("0F 1F | 1B 0B"))
    assert text(schedule) == (
        "0F 1F | 1FETCH_GRAD 1B 1REDUCE_SCATTER 1ADD_GRAD 1OFFLOAD_GRAD "
        "0FETCH_GRAD 0B 0REDUCE_SCATTER 0ADD_GRAD 0OFFLOAD_GRAD"
    )
    assert schedule.backward is not None
    for add in ops.nodes_of(schedule.backward, ops.add_grad):
        taken = [n.target for n in add.all_input_nodes]
        assert ops.reduce_scatter in taken, taken


# Replicas.


def summed(line: str, *, defers: bool = False, accumulate: bool = False, **stubs: Any) -> Schedule:
    offload = functools.partial(offload_gradients, accumulate=accumulate)
    schedule = offload(reduced(line, replicas=2, **stubs))
    return insert_norms(apply(functools.partial(insert_all_reduce, defers=defers), schedule))


def test_replicas_average_what_ranks_have_averaged() -> None:
    """The docstring's example."""
    schedule = summed("0F 1F | 1B 0B")
    assert text(schedule) == (
        "0F 1F | 1B 1REDUCE_SCATTER 1ALL_REDUCE 1NORM_GRAD 1OFFLOAD_GRAD "
        "0B 0REDUCE_SCATTER 0ALL_REDUCE 0NORM_GRAD 0OFFLOAD_GRAD"
    )
    assert not schedule.defers and schedule.backward is not None
    for mean in ops.nodes_of(schedule.backward, ops.all_reduce):
        assert mean.meta["value"] == ops.arguments(mean)[1].meta["value"]
        assert {user.target for user in mean.users} == {ops.norm_grad, ops.offload_grad}


def test_replicas_average_the_sum_with_earlier_backwards() -> None:
    assert text(summed("0F | 0B", accumulate=True)) == (
        "0F | 0FETCH_GRAD 0B 0REDUCE_SCATTER 0ADD_GRAD 0ALL_REDUCE 0NORM_GRAD 0OFFLOAD_GRAD"
    )


def test_a_backward_that_another_one_follows_leaves_that_to_it() -> None:
    """Nor does it take norms, which would be those of a part."""
    schedule = summed("0F | 0B", accumulate=True, defers=True)
    assert schedule.defers
    assert text(schedule) == "0F | 0FETCH_GRAD 0B 0REDUCE_SCATTER 0ADD_GRAD 0OFFLOAD_GRAD"


@pytest.mark.parametrize("defers", [False, True])
def test_without_replicas_there_is_nothing_to_leave(defers: bool) -> None:
    schedule = reduced("0F | 0B")
    function = functools.partial(insert_all_reduce, defers=defers)
    assert apply(function, schedule) is schedule


def test_the_next_stages_compute_while_replicas_average() -> None:
    """The docstring's examples."""
    once = text(delay_reduced(summed("0F 1F 2F | 2B 1B 0B")))
    assert once.startswith(
        "0F 1F 2F | 2B 2REDUCE_SCATTER 2ALL_REDUCE 1B 2NORM_GRAD 2OFFLOAD_GRAD 1REDUCE_SCATTER"
    )
    twice = text(delay_reduced(summed("0F 1F 2F | 2B 1B 0B", accumulate=True)))
    assert twice == (
        "0F 1F 2F | 2FETCH_GRAD 2B 2REDUCE_SCATTER 1FETCH_GRAD 1B 2ADD_GRAD 2ALL_REDUCE "
        "1REDUCE_SCATTER 0FETCH_GRAD 0B 2NORM_GRAD 2OFFLOAD_GRAD 1ADD_GRAD 1ALL_REDUCE "
        "1NORM_GRAD 1OFFLOAD_GRAD 0REDUCE_SCATTER 0ADD_GRAD 0ALL_REDUCE 0NORM_GRAD 0OFFLOAD_GRAD"
    )
