"""`insert_prefetch`: which buckets are fetched, and how early."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.prefetch import insert_prefetch
from tests.actions import apply, parse, text


def prefetched(line: str, *, lookahead: int = 1, **stubs: Any) -> Schedule:
    return apply(functools.partial(insert_prefetch, lookahead=lookahead), parse(line, **stubs))


def out(line: str, *, lookahead: int = 1, **stubs: Any) -> str:
    """The actions afterwards, without the slots, which are not chosen yet."""
    return text(prefetched(line, lookahead=lookahead, **stubs)).replace("@?", "")


def test_one_stage_ahead() -> None:
    """The docstring's example."""
    assert out("0F 1F 2F 3F") == "0PREFETCH 1PREFETCH 0F 2PREFETCH 1F 3PREFETCH 2F 3F"


@pytest.mark.parametrize(
    ("lookahead", "after"),
    [
        (1, "0PREFETCH 1PREFETCH 0F 2PREFETCH 1F 3PREFETCH 2F 3F"),
        (2, "0PREFETCH 1PREFETCH 2PREFETCH 0F 3PREFETCH 1F 2F 3F"),
        (3, "0PREFETCH 1PREFETCH 2PREFETCH 3PREFETCH 0F 1F 2F 3F"),
        (9, "0PREFETCH 1PREFETCH 2PREFETCH 3PREFETCH 0F 1F 2F 3F"),
    ],
)
def test_further_ahead(lookahead: int, after: str) -> None:
    assert out("0F 1F 2F 3F", lookahead=lookahead) == after


def test_the_schedule_begins_with_begin() -> None:
    schedule = prefetched("0F 1F | 1B 0B")
    for graph in schedule.graphs.values():
        first = next(node for node in graph.nodes if node.op != "placeholder")
        assert first.target is ops.begin


def test_a_recompute_and_its_backward_are_one_use() -> None:
    assert out("0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B") == (
        "0PREFETCH 1PREFETCH 0F 2PREFETCH 1F 2F "
        "| 2PREFETCH 1PREFETCH 2B 0PREFETCH 1RECOMPUTE 1B 0RECOMPUTE 0B"
    )


def test_what_is_not_read_is_not_fetched() -> None:
    """An embedding's backward needs no weight."""
    assert out("0F 1F | 1B 0B", blind=(0,)) == "0PREFETCH 1PREFETCH 0F 1F | 1PREFETCH 1B 0B"
    schedule = prefetched("0F 1F | 1B 0B", blind=(0,))
    assert schedule.backward is not None
    last = ops.nodes_of(schedule.backward, ops.backward)[-1]
    assert ops.arguments(last)[1] == (None,)


def test_a_stage_of_two_buckets_gets_both() -> None:
    assert out("0F 1F 2F", reads={1: "1 1.1"}) == (
        "0PREFETCH 1PREFETCH 1.1PREFETCH 0F 2PREFETCH 1F 2F"
    )
    schedule = prefetched("0F 1F 2F", reads={1: "1 1.1"})
    weights = [ops.arguments(n)[1] for n in ops.nodes_of(schedule.forward, ops.forward)]
    assert [[w.name for w in each] for each in weights] == [["w0"], ["w1", "w1_1"], ["w2"]]


def test_uses_in_a_row_share_a_fetch() -> None:
    """A layer called twice over."""
    assert out("0F 1F 2F 3F", reads={2: "1"}) == "0PREFETCH 1PREFETCH 0F 1F 3PREFETCH 2F 3F"


def test_uses_that_are_apart_fetch_again() -> None:
    assert (
        out("0F 1F 2F 3F", reads={3: "0"}) == "0PREFETCH 1PREFETCH 0F 2PREFETCH 1F 0PREFETCH 2F 3F"
    )
    schedule = prefetched("0F 1F 2F 3F", reads={3: "0"})
    last = ops.nodes_of(schedule.forward, ops.forward)[-1]
    again = ops.nodes_of(schedule.forward, ops.prefetch)[-1]
    assert ops.arguments(last)[1] == (again,)


def test_each_compute_is_given_what_it_reads() -> None:
    schedule = prefetched("0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B", lookahead=2)
    for graph in schedule.graphs.values():
        for node in ops.nodes_of(graph, ops.forward, ops.recompute, ops.backward):
            stage, weights, *_ = ops.arguments(node)
            assert [ops.arguments(w)[0] for w in weights] == list(stage.buckets)


def test_it_goes_in_front_of_what_prepares_a_use() -> None:
    assert out("0F 1RNG 1F 2F", random=(1,)) == "0PREFETCH 1PREFETCH 0F 2PREFETCH 1RNG 1F 2F"
    line = "1FETCH_GRAD 1B 1ADD_GRAD 0FETCH_GRAD 0B 0ADD_GRAD"
    assert out(f"0F 1F | {line}").partition(" | ")[2] == f"1PREFETCH 0PREFETCH {line}"
