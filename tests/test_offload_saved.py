"""`offload_saved_tensors`: what waits on the host, when it goes, when it is back, what stays."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.ir.tensors import TensorMeta, tensors_bytes
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.offload_saved import offload_saved_tensors
from megacompile.passes.schedule.recompute import insert_recompute
from megacompile.verify.proof import verify
from tests.actions import apply, frees, parse, text
from tests.capturing import Counting, Net, capture
from tests.interleavings import Interleavings

X = torch.linspace(-1, 1, 8).view(2, 4)
CHAIN = "0F 1F 2F 3F | 3B 2B 1B 0B"


def offloaded(
    line: str,
    offload: Sequence[int],
    *,
    keep: Sequence[int] = (3,),
    lookahead: int = 1,
    **stubs: Any,
) -> Schedule:
    plan = Plan(frozenset(keep), offload=frozenset(offload))
    schedule = insert_recompute(replace(parse(line, **stubs), plan=plan))
    return apply(functools.partial(offload_saved_tensors, lookahead=lookahead), schedule)


def test_stage_inputs_wait_on_the_host() -> None:
    """The docstring's example; the input of 0F is the user's."""
    assert text(offloaded(CHAIN, (0, 1, 2))) == (
        "0F 1OFFLOAD_SAVED 1F 2OFFLOAD_SAVED 2F 3F | "
        "2FETCH_SAVED 3B 1FETCH_SAVED 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    )


@pytest.mark.parametrize(
    ("lookahead", "backward"),
    [
        (0, "3B 2FETCH_SAVED 2RECOMPUTE 2B 1FETCH_SAVED 1RECOMPUTE 1B 0RECOMPUTE 0B"),
        (2, "2FETCH_SAVED 1FETCH_SAVED 3B 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"),
        (9, "2FETCH_SAVED 1FETCH_SAVED 3B 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"),
    ],
)
def test_they_are_back_so_many_stages_ahead(lookahead: int, backward: str) -> None:
    assert text(offloaded(CHAIN, (1, 2), lookahead=lookahead)).endswith(f"| {backward}")


def test_saved_tensors_of_kept_stages_wait_too() -> None:
    schedule = offloaded(CHAIN, (1,), keep=(0, 1, 2, 3))
    assert text(schedule) == "0F 1OFFLOAD_SAVED 1F 1OFFLOAD_SAVED 2F 3F | 3B 1FETCH_SAVED 2B 1B 0B"
    assert schedule.backward is not None
    (call,) = [n for n in ops.nodes_of(schedule.backward, ops.backward) if label(n) == "1B"]
    assert [value.name for value in ops.arguments(call)[3]] == ["s1_0_back"]


def test_the_residuals_are_the_copies_on_the_host() -> None:
    schedule = offloaded(CHAIN, (1,))
    assert "y0_0_host" in schedule.saved_values and "y0_0" not in schedule.saved_values
    assert schedule.backward is not None
    names = [node.name for node in schedule.backward.find_nodes(op="placeholder")]
    assert "y0_0_host" in names and "y0_0" not in names


def test_without_a_plan_nothing_changes() -> None:
    assert (
        text(offloaded(CHAIN, ())) == "0F 1F 2F 3F | 3B 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    )
    assert text(apply(offload_saved_tensors, parse("0F 1F"))) == "0F 1F"


def test_random_state_stays() -> None:
    schedule = offloaded("0F 1RNG 1F 2F 3F | 3B 2B 1B 0B", (1, 2), random=(1,))
    assert "rng1" in schedule.saved_values and "rng1_host" not in schedule.saved_values


def test_device_memory_is_given_back_behind_the_copy() -> None:
    """One further forward is issued before the wait, so that the copy has had time."""
    schedule = insert_free(offloaded(CHAIN, (1,)))
    assert frees(schedule.forward) == "0F 1OFFLOAD_SAVED 1F 2F -y0_0(after=1OFFLOAD_SAVED) 3F"


def test_what_came_back_dies_with_its_last_reader_and_its_copy_too() -> None:
    """Without another wait: the recompute is behind the fetch."""
    schedule = insert_free(offloaded(CHAIN, (1,)))
    assert schedule.backward is not None
    assert "1RECOMPUTE -y0_0_back -y0_0_buf -y0_0_host 1B" in frees(schedule.backward)


# Captured models.


def build(
    function: Any, plan: Plan, *, depth: int = 6, lookahead: int = 1, **layer: Any
) -> Schedule:
    """The schedule of a `Net` for a plan, proved safe."""
    captured = capture(Net(function, depth=depth, **layer), X)
    schedule = captured.with_tangent()
    for name, function in captured.passes(lookahead=lookahead).items():
        schedule = function(schedule)
        if name == "plan":
            schedule = replace(schedule, plan=plan)
    verify(schedule)
    return schedule


def label(node: fx.Node) -> str:
    return ops.label(node)


def waiting(schedule: Schedule) -> list[str]:
    return [label(node) for node in ops.nodes_of(schedule.forward, ops.offload_saved)]


def skips(net: Net, x: Tensor) -> Tensor:
    """Like a U-Net: stage 1's output is read by stages 2 and 6, stage 2's by 3 and 5."""
    x = net.embed(x)
    down = [x := net.layers[0](x), x := net.layers[1](x)]
    x = net.layers[3](net.layers[2](x))
    x = net.layers[4](x * down[1])
    x = net.layers[5](x * down[0])
    loss: Tensor = net.head(x).square().mean()
    return loss


def test_a_value_that_several_stages_take_goes_once_and_is_back_for_the_first() -> None:
    schedule = build(skips, Plan(offload=frozenset(range(7))))
    copies = [
        node.all_input_nodes[0].name for node in ops.nodes_of(schedule.forward, ops.offload_saved)
    ]
    assert len(copies) == len(set(copies))
    assert schedule.backward is not None
    fetches = ops.nodes_of(schedule.backward, ops.fetch_saved)
    assert len(fetches) <= len(copies)
    several = [node for node in fetches if len(stages_reading(node)) > 1]
    assert several, "a skip"
    for fetch in several:
        release = next(user for user in fetch.users if user.target is ops.free)
        order = list(schedule.backward.nodes)
        readers = [user for user in fetch.users if user is not release]
        assert order.index(fetch) < min(map(order.index, readers))
        assert order.index(release) > max(map(order.index, readers))


def stages_reading(value: fx.Node) -> set[int]:
    computes = (ops.recompute, ops.backward)
    return {ops.arguments(u)[0].index for u in value.users if u.target in computes}


def test_a_value_that_a_stage_on_the_device_takes_stays_there() -> None:
    """It must be there at the boundary anyway."""
    whole = build(skips, Plan(offload=frozenset(range(7))))
    less = build(skips, Plan(offload=frozenset(range(5))))
    gone = set(names_on_host(whole)) - set(names_on_host(less))
    assert "y1_0_host" in gone, "stage 6 takes it"


def names_on_host(schedule: Schedule) -> list[str]:
    return [node.name for node in ops.nodes_of(schedule.forward, ops.offload_saved)]


def test_what_is_returned_to_the_user_stays() -> None:
    def both(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = net.layers[1](net.layers[0](net.embed(x)))
        return net.head(net.layers[2](middle)).mean(), middle

    schedule = build(both, Plan(offload=frozenset(range(4))))
    outputs, _ = ops.returned(schedule.forward)
    taken = [node.all_input_nodes[0] for node in ops.nodes_of(schedule.forward, ops.offload_saved)]
    assert taken and outputs[1] not in taken


def test_copies_of_what_changes_in_place_wait_as_they_were() -> None:
    captured = capture(nn.Sequential(Counting(), Counting(), Counting()), X)
    schedule = captured.with_tangent()
    for name, function in captured.passes(keep_last=False).items():
        schedule = function(schedule)
        if name == "plan":
            schedule = replace(schedule, plan=Plan(offload=frozenset({0, 1})))
    verify(schedule)
    assert any(name.endswith("_old_host") for name in names_on_host(schedule))
    assert ops.actions(schedule.forward).count("SNAPSHOT") == 3


@pytest.mark.parametrize("keep", [(), (1, 2)], ids=["recompute", "keep"])
def test_no_interleaving_corrupts_it(keep: tuple[int, ...]) -> None:
    plan = Plan(frozenset(keep), offload=frozenset({1, 2}))
    schedule = build(Net.chain, plan, depth=2)
    assert waiting(schedule)
    for name in ("forward", "backward"):
        assert Interleavings(schedule.graphs[name]).corrupted() == set()


# Memory.


def held_at_the_turn(schedule: Schedule) -> int:
    """Device bytes of what the forward hands to the backward."""
    _, saved_values = ops.returned(schedule.forward)
    return sum(
        tensors_bytes(node.meta.get("value"))
        for node in saved_values
        if node.op != "placeholder" and node.target is not ops.offload_saved
    )


def peak_bytes(graph: fx.Graph) -> int:
    """The most activations that are alive at once on the device, by the schedule's lifetimes."""
    alive: dict[fx.Node, int] = {}
    peak = 0
    for node in graph.nodes:
        if node.target is ops.free:
            alive.pop(ops.arguments(node)[0], None)
        elif node.target in (operator.getitem, ops.alloc_saved, ops.snapshot):
            value = node.meta.get("value")
            alive[node] = value.size_bytes if isinstance(value, TensorMeta) else 0
        peak = max(peak, sum(alive.values()))
    return peak


def test_device_memory_does_not_grow_with_depth() -> None:
    """Neither at the boundary nor at its peak; recomputed from the device it does."""

    def sizes(activations: str) -> list[tuple[int, ...]]:
        found = []
        for depth in (8, 16, 24):
            captured = capture(Net(Net.chain, depth=depth), X)
            schedule = captured.build(activations=activations, lookahead=1)
            peaks = [peak_bytes(graph) for graph in schedule.graphs.values()]
            found.append((held_at_the_turn(schedule), *peaks))
        return found

    less, same, more = sizes("offload")
    assert less == same == more
    less, same, more = sizes("recompute")
    assert less[0] < same[0] < more[0]
