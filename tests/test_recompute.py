"""`insert_recompute`: what is run again, what is saved no more, and with which random numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.ir.stages import Code
from megacompile.passes.schedule.recompute import insert_recompute
from tests.actions import apply, parse, text
from tests.capturing import Counting, Net, capture

X = torch.linspace(-1, 1, 8).view(2, 4)
CHAIN = "0F 1F 2F | 2B 1B 0B"


def recomputed(line: str, keep: frozenset[int] = frozenset({2}), **stubs: Any) -> Schedule:
    """`line` after the pass, with the stages of `keep` kept."""
    return apply(insert_recompute, replace(parse(line, **stubs), plan=Plan(keep)))


def test_a_recompute_in_front_of_each_backward() -> None:
    """The docstring's example."""
    assert text(recomputed(CHAIN)) == "0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"


def test_the_plan_says_which() -> None:
    assert text(recomputed(CHAIN, keep=frozenset({0, 1, 2}))) == CHAIN
    assert text(recomputed(CHAIN, keep=frozenset({1}))) == (
        "0F 1F 2F | 2RECOMPUTE 2B 1B 0RECOMPUTE 0B"
    )
    assert text(recomputed(CHAIN, keep=frozenset())) == (
        "0F 1F 2F | 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    )


def test_a_forward_alone_stays_as_it_is() -> None:
    assert text(recomputed("0F 1F")) == "0F 1F"


def test_a_stage_that_saves_nothing_is_not_recomputed() -> None:
    assert text(recomputed(CHAIN, unsaved=(1,))) == "0F 1F 2F | 2B 1B 0RECOMPUTE 0B"


def test_the_forward_saves_only_what_is_kept() -> None:
    schedule = recomputed(CHAIN)
    forwards = ops.nodes_of(schedule.forward, ops.forward)
    assert [ops.arguments(node)[3] for node in forwards] == [False, False, True]
    assert [len(node.meta["value"]) for node in forwards] == [1, 1, 2]
    assert schedule.saved_values == ("s2_0", "x", "y0_0", "y1_0")
    names = {node.name for node in schedule.forward.nodes}
    assert "s2_0" in names and not names & {"s0_0", "s1_0"}


def test_a_backward_takes_the_recomputes_results() -> None:
    schedule = recomputed(CHAIN)
    assert schedule.backward is not None
    taken = [node.name for node in schedule.backward.find_nodes(op="placeholder")]
    assert sorted(taken) == ["s2_0", "t0", "x", "y0_0"], "y1_0 is for a backward of other outputs"
    for node in ops.nodes_of(schedule.backward, ops.backward):
        saved = [value.name for value in ops.arguments(node)[3]]
        stage = ops.arguments(node)[0].index
        assert saved == [f"s{stage}_0" + ("" if stage == 2 else "_again")]


def test_a_random_stage_is_given_the_state_of_its_forward() -> None:
    schedule = recomputed("0F 1RNG 1F 2F | 2B 1B 0B", random=(1,))
    assert text(schedule) == "0F 1RNG 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    assert schedule.backward is not None
    states = [ops.arguments(n)[3] for n in ops.nodes_of(schedule.backward, ops.recompute)]
    assert [state and state.name for state in states] == ["rng1", None]


def test_a_layers_last_product_is_not_run_again() -> None:
    """Nobody needs a layer's output in its backward: its down projection is left out."""
    schedule = capture(Net(Net.chain), X).build("recompute")
    assert text(schedule) == ("0F 1F 2F 3F 4F | 4B 3RECOMPUTE 3B 2RECOMPUTE 2B 1RECOMPUTE 1B 0B")
    stage = schedule.stages[1]
    names = [param.name for param in stage.buckets[0].params]
    read = [names[i] for i in stage.traced.recompute_primals if i < len(names)]
    assert read == ["layers.0.up.weight", "layers.0.up.bias"]
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    again = stage.traced.graphs[Code.RECOMPUTE].graph
    assert sum(node.target in products for node in again.nodes) == 1


def test_an_input_that_is_changed_is_recomputed_from_its_copy() -> None:
    model = nn.Sequential(Counting(), Counting())
    schedule = capture(model, X).build("recompute", keep_last=False)
    assert text(schedule) == "0F SNAPSHOT ASSIGN 1F SNAPSHOT ASSIGN | 1RECOMPUTE 1B 0RECOMPUTE 0B"
    assert schedule.backward is not None
    for node in ops.nodes_of(schedule.backward, ops.recompute):
        taken = [value.name for value in ops.arguments(node)[2] if value]
        assert taken[-1].endswith("_old")
