"""`insert_reduce_scatter`, `insert_all_reduce`, `insert_all_gather`, `delay_reduced`: what ranks
that share buckets do together. Strings in, strings out; some are the docstrings' examples."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def offloaded(line: str, **stubs: Any) -> Schedule:
    return offload_gradients(reduced(line, **stubs), accumulate=True)


def summed(line: str, *, defers: bool = False, accumulate: bool = False, **stubs: Any) -> Schedule:
    schedule = offload_gradients(reduced(line, replicas=2, **stubs), accumulate=accumulate)
    return insert_norms(apply(functools.partial(insert_all_reduce, defers=defers), schedule))


def delayed(line: str, **options: Any) -> Schedule:
    return delay_reduced(summed(line, **options))


UPDATING = "0F 1F | 1FETCH_STATE 1PREFETCH@0 1B 1REDUCE_SCATTER {}1UPDATE 1OFFLOAD_STATE 0B"
CASES: dict[str, tuple[Callable[..., Schedule], dict[str, Any], str, str]] = {
    "each fetch is of a part, and a gather follows": (
        *(gathered, {}, "0PREFETCH@0 1PREFETCH@1 0F 2PREFETCH@0 1F 2F"),
        "0PREFETCH_SHARD@0 0ALL_GATHER@0 1PREFETCH_SHARD@1 1ALL_GATHER@1 0F "
        "2PREFETCH_SHARD@0 2ALL_GATHER@0 1F 2F",
    ),
    "one rank gathers nothing": (
        *(gathered, {"ranks": 1}, "0PREFETCH@0 0F | 0B"),
        "0PREFETCH@0 0F | 0B",
    ),
    "one rank averages nothing": (reduced, {"ranks": 1}, "0F | 0B", "0F | 0B"),
    "gradients are averaged behind each backward": (
        *(reduced, {}, "0F 1F 2F | 2B 1B 0B"),
        "0F 1F 2F | 2B 2REDUCE_SCATTER 1B 1REDUCE_SCATTER 0B 0REDUCE_SCATTER",
    ),
    "a shared bucket behind its last part": (
        *(reduced, {"reads": {2: "0"}}, "0F 1F 2F | 2B 1B 0B"),
        "0F 1F 2F | 2B 1B 1REDUCE_SCATTER 0B 0REDUCE_SCATTER",
    ),
    "what follows takes the mean": (
        *(offloaded, {}, "0F 1F | 1B 0B"),
        "0F 1F | 1FETCH_GRAD 1B 1REDUCE_SCATTER 1ADD_GRAD 1OFFLOAD_GRAD "
        "0FETCH_GRAD 0B 0REDUCE_SCATTER 0ADD_GRAD 0OFFLOAD_GRAD",
    ),
    "replicas average what ranks have averaged": (
        *(summed, {}, "0F 1F | 1B 0B"),
        "0F 1F | 1B 1REDUCE_SCATTER 1ALL_REDUCE 1NORM_GRAD 1OFFLOAD_GRAD "
        "0B 0REDUCE_SCATTER 0ALL_REDUCE 0NORM_GRAD 0OFFLOAD_GRAD",
    ),
    "and the sum with earlier backwards": (
        *(summed, {"accumulate": True}, "0F | 0B"),
        "0F | 0FETCH_GRAD 0B 0REDUCE_SCATTER 0ADD_GRAD 0ALL_REDUCE 0NORM_GRAD 0OFFLOAD_GRAD",
    ),
    "what another backward follows leaves that to it, and takes no norms of parts": (
        *(summed, {"accumulate": True, "defers": True}, "0F | 0B"),
        "0F | 0FETCH_GRAD 0B 0REDUCE_SCATTER 0ADD_GRAD 0OFFLOAD_GRAD",
    ),
    "the next stages compute while replicas average": (
        *(delayed, {}, "0F 1F 2F | 2B 1B 0B"),
        "0F 1F 2F | 2B 2REDUCE_SCATTER 2ALL_REDUCE 1B 2NORM_GRAD 2OFFLOAD_GRAD 1REDUCE_SCATTER "
        "1ALL_REDUCE 0B 1NORM_GRAD 1OFFLOAD_GRAD 0REDUCE_SCATTER 0ALL_REDUCE 0NORM_GRAD "
        "0OFFLOAD_GRAD",
    ),
    "two of them, behind what is added": (
        *(delayed, {"accumulate": True}, "0F 1F 2F | 2B 1B 0B"),
        "0F 1F 2F | 2FETCH_GRAD 2B 2REDUCE_SCATTER 1FETCH_GRAD 1B 2ADD_GRAD 2ALL_REDUCE "
        "1REDUCE_SCATTER 0FETCH_GRAD 0B 2NORM_GRAD 2OFFLOAD_GRAD 1ADD_GRAD 1ALL_REDUCE "
        "1NORM_GRAD 1OFFLOAD_GRAD 0REDUCE_SCATTER 0ADD_GRAD 0ALL_REDUCE 0NORM_GRAD 0OFFLOAD_GRAD",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_actions(name: str) -> None:
    function, options, line, expected = CASES[name]
    assert text(function(line, **options)) == expected


def test_stages_read_what_was_gathered_and_waits_stay_with_the_copy() -> None:
    for graph in gathered("0PREFETCH@0 0F | 0PREFETCH@0 0RECOMPUTE 0B").graphs.values():
        (part,) = ops.nodes_of(graph, ops.prefetch_shard)
        (whole,) = ops.nodes_of(graph, ops.all_gather)
        assert list(part.users) == [whole]
        readers = ops.nodes_of(graph, ops.forward, ops.recompute)
        assert readers and all(node in whole.users for node in readers)
    line = parse("0PREFETCH@0 0F 1PREFETCH@0 1F", ranks=2)
    _, second = ops.nodes_of(line.forward, ops.prefetch)
    (reader, _) = ops.nodes_of(line.forward, ops.forward)
    second.kwargs = {"after": (reader,)}
    schedule = insert_all_gather(line)
    _, part = ops.nodes_of(schedule.forward, ops.prefetch_shard)
    after: Any = part.kwargs["after"]
    assert [node.name for node in after] == [reader.name]
    assert not any("after" in n.kwargs for n in ops.nodes_of(schedule.forward, ops.all_gather))


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


def test_who_takes_the_mean() -> None:
    backward = offloaded("0F 1F | 1B 0B").backward
    assert backward is not None
    for add in ops.nodes_of(backward, ops.add_grad):
        assert ops.reduce_scatter in [node.target for node in add.all_input_nodes]
    schedule = summed("0F 1F | 1B 0B")
    assert not schedule.defers and schedule.backward is not None
    for mean in ops.nodes_of(schedule.backward, ops.all_reduce):
        assert mean.meta["value"] == ops.arguments(mean)[1].meta["value"]
        assert {user.target for user in mean.users} == {ops.norm_grad, ops.offload_grad}
    assert summed("0F | 0B", accumulate=True, defers=True).defers


@pytest.mark.parametrize("defers", [False, True])
def test_without_replicas_there_is_nothing_to_leave(defers: bool) -> None:
    schedule = reduced("0F | 0B")
    assert apply(functools.partial(insert_all_reduce, defers=defers), schedule) is schedule
