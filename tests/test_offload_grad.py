"""`offload_gradients`: when each bucket's gradients go to the host."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.passes.schedule.offload_grad import offload_gradients
from tests.actions import apply, parse, text


def offloaded(
    line: str, *, accumulate: bool = False, resident: frozenset[int] = frozenset(), **stubs: Any
) -> Schedule:
    function = functools.partial(offload_gradients, accumulate=accumulate)
    return apply(function, replace(parse(line, **stubs), plan=Plan(resident=resident)))


def backward(line: str, *, accumulate: bool = False, **stubs: Any) -> str:
    """What the pass makes of a backward."""
    stages = 1 + max(int(word[0]) for word in line.split())
    forward = " ".join(f"{i}F" for i in range(stages))
    schedule = offloaded(f"{forward} | {line}", accumulate=accumulate, **stubs)
    return text(schedule).partition(" | ")[2]


def values(schedule: Schedule) -> str:
    """Which gradients each offload and sum takes: "1OFFLOAD_GRAD(g1_1)"."""
    assert schedule.backward is not None
    nodes = ops.nodes_of(schedule.backward, ops.add_grad, ops.keep_grad, ops.offload_grad)
    shown = [(n, " ".join(value.name for value in ops.arguments(n)[1:])) for n in nodes]
    return " ".join(f"{ops.label(n)}({names})" for n, names in shown)


def test_each_bucket_goes_behind_its_backward() -> None:
    """The docstring's first example."""
    assert backward("2B 1B 0B") == "2B 2OFFLOAD_GRAD 1B 1OFFLOAD_GRAD 0B 0OFFLOAD_GRAD"


def test_gradients_on_the_host_are_fetched_before_the_stage_and_added_after() -> None:
    """The docstring's second example."""
    assert backward("1RECOMPUTE 1B 0RECOMPUTE 0B", accumulate=True) == (
        "1FETCH_GRAD 1RECOMPUTE 1B 1ADD_GRAD 1OFFLOAD_GRAD "
        "0FETCH_GRAD 0RECOMPUTE 0B 0ADD_GRAD 0OFFLOAD_GRAD"
    )
    assert backward("0B", accumulate=True) == "0FETCH_GRAD 0B 0ADD_GRAD 0OFFLOAD_GRAD"


def test_what_lives_on_the_device_keeps_its_gradients() -> None:
    """No later than the last backward that adds to them, whoever reads the weights after it."""
    resident = frozenset({1})
    assert backward("2B 1B 0B", resident=resident) == (
        "2B 2OFFLOAD_GRAD 1B 1KEEP_GRAD 0B 0OFFLOAD_GRAD"
    )
    assert backward("1B 0B", resident=resident, accumulate=True) == (
        "1FETCH_GRAD 1B 1ADD_GRAD 1KEEP_GRAD 0FETCH_GRAD 0B 0ADD_GRAD 0OFFLOAD_GRAD"
    )
    schedule = offloaded("0F 1F | 1B 0B", resident=resident, accumulate=True)
    assert "1KEEP_GRAD(sum1)" in values(schedule)


def test_a_forward_alone_stays_as_it_is() -> None:
    assert text(offloaded("0F 1F")) == "0F 1F"


def test_a_shared_bucket_goes_behind_the_last_backward_that_adds_to_it() -> None:
    line, reads = "2B 1B 0B", {2: "0"}
    assert backward(line, reads=reads) == "2B 1B 1OFFLOAD_GRAD 0B 0OFFLOAD_GRAD"
    assert backward(line, reads=reads, accumulate=True) == (
        "2B 1FETCH_GRAD 1B 1ADD_GRAD 1OFFLOAD_GRAD 0FETCH_GRAD 0B 0ADD_GRAD 0OFFLOAD_GRAD"
    )


def test_a_stage_of_several_buckets_offloads_each() -> None:
    reads = {0: "0 0.1", 1: "1 0.1"}
    schedule = offloaded("0F 1F | 1B 0B", reads=reads)
    assert values(schedule) == ("1OFFLOAD_GRAD(g1_1) 0OFFLOAD_GRAD(g0_0) 0.1OFFLOAD_GRAD(g0_1_0)")


def test_what_is_offloaded_is_the_sum() -> None:
    schedule = offloaded("0F 1F | 1B 0RECOMPUTE 0B", accumulate=True)
    assert values(schedule) == (
        "1ADD_GRAD(h1 g1_1) 1OFFLOAD_GRAD(sum1) 0ADD_GRAD(h0 g0_0) 0OFFLOAD_GRAD(sum0)"
    )


def test_each_fetch_has_a_buffer_of_its_own() -> None:
    schedule = offloaded("0F 1F | 1B 0B", accumulate=True)
    assert schedule.backward is not None
    fetches = ops.nodes_of(schedule.backward, ops.fetch_grad)
    buffers = [ops.arguments(node)[1] for node in fetches]
    assert [buffer.name for buffer in buffers] == ["buf_g1", "buf_g0"]
    for fetch, buffer in zip(fetches, buffers, strict=True):
        assert buffer.args[0] is fetch.args[0], "of the same bucket"
        assert buffer.meta["value"] == fetch.meta["value"] is not None
