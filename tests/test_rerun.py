"""`insert_reruns`: whose outputs are computed again, when, and that the numbers are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from megacompile import schedules
from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.passes.schedule import prefetch
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.offload_saved import offload_saved_tensors
from megacompile.passes.schedule.plan import make_plan, reruns
from megacompile.passes.schedule.recompute import insert_recompute
from megacompile.passes.schedule.rerun import insert_reruns
from megacompile.verify.proof import verify
from tests import cases, zoo
from tests.actions import apply, frees, parse, text
from tests.capturing import Net, capture
from tests.draws import drawn
from tests.test_activations import CPU, Two, planned
from tests.test_offload_saved import build
from tests.zoo import assert_same, twins

X = torch.linspace(-1, 1, 8).view(2, 4)
CHAIN = "0F 1F 2F 3F | 3B 2B 1B 0B"


def rerun(line: str, which: Sequence[int], *, keep: Sequence[int] = (3,), **stubs: Any) -> Schedule:
    plan = Plan(frozenset(keep), rerun=frozenset(which))
    return apply(insert_reruns, insert_recompute(replace(parse(line, **stubs), plan=plan)))


def again(schedule: Schedule) -> list[str]:
    assert schedule.backward is not None
    return [ops.label(node) for node in ops.nodes_of(schedule.backward, ops.rerun)]


def test_outputs_are_computed_again_ahead_of_their_first_use() -> None:
    schedule = rerun(CHAIN, (1,))
    assert text(schedule) == ("0F 1F 2F 3F | 3B 1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B")
    assert "y1_0" not in schedule.saved_values and {"y0_0", "y2_0"} <= set(schedule.saved_values)


def test_of_stages_in_a_row_what_the_first_is_given_is_saved() -> None:
    schedule = rerun(CHAIN, (0, 1, 2))
    assert text(schedule) == (
        "0F 1F 2F 3F | 3B 0RERUN 1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    ), "nothing asks for what stage 2 gives"
    assert set(schedule.saved_values) == {"s3_0", "x"}


def test_rows_are_run_again_each_ahead_of_its_last() -> None:
    schedule = rerun("0F 1F 2F 3F 4F 5F 6F | 6B 5B 4B 3B 2B 1B 0B", (1, 2, 4, 5), keep=())
    assert again(schedule) == ["4RERUN", "5RERUN", "1RERUN", "2RERUN"]
    assert {"y0_0", "y3_0"} <= set(schedule.saved_values)
    assert not {"y1_0", "y2_0", "y4_0", "y5_0"} & set(schedule.saved_values)


def test_the_backward_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each stage: a search makes dozens of schedules with as many stages each."""
    looked: list[int] = []
    find = prefetch.uses

    def counted(graph: fx.Graph) -> list[prefetch.Use]:
        looked.append(len(graph.nodes))
        return find(graph)

    monkeypatch.setattr("megacompile.passes.schedule.rerun.uses", counted)
    schedule = rerun("0F 1F 2F 3F 4F 5F 6F | 6B 5B 4B 3B 2B 1B 0B", (1, 3, 5), keep=())
    assert again(schedule) == ["5RERUN", "3RERUN", "1RERUN"] and len(looked) == 1


def test_without_a_plan_nothing_changes() -> None:
    assert again(rerun(CHAIN, ())) == []
    assert text(rerun("0F 1F", (0,))) == "0F 1F"


def test_the_same_random_numbers() -> None:
    schedule = rerun("0F 1RNG 1F 2F 3F | 3B 2B 1B 0B", (1,), random=(1,))
    assert schedule.backward is not None
    (node,) = ops.nodes_of(schedule.backward, ops.rerun)
    assert ops.arguments(node)[3].name == "rng1"


def test_what_is_computed_again_dies_with_its_last_reader() -> None:
    schedule = insert_free(rerun(CHAIN, (1,)))
    assert schedule.backward is not None
    assert "2RECOMPUTE -y1_0_again 2B" in frees(schedule.backward)


def test_what_a_rerun_is_given_comes_from_the_host_in_time() -> None:
    plan = Plan(frozenset({3}), offload=frozenset({0, 1, 2}), rerun=frozenset({1}))
    schedule = apply(insert_reruns, insert_recompute(replace(parse(CHAIN), plan=plan)))
    schedule = apply(functools.partial(offload_saved_tensors, lookahead=1), schedule)
    assert text(schedule) == (
        "0F 1OFFLOAD_SAVED 1F 2F 3F | "
        "1FETCH_SAVED 3B 1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    )


# Captured models.


def chain(net: Net, x: Tensor) -> Tensor:
    x = net.embed(x)
    for layer in net.layers:
        x = layer(x)
    loss: Tensor = net.head(x).square().mean()
    return loss


def skips(net: Net, x: Tensor) -> Tensor:
    """What stage 1 gives is read by stages 2 and 4."""
    x = net.embed(x)
    early = net.layers[0](x)
    x = net.layers[2](net.layers[1](early))
    loss: Tensor = net.head(x * early).square().mean()
    return loss


def test_every_other_stage_of_a_plan() -> None:
    captured = capture(Net(chain, depth=6), X)
    schedule = captured.build("differentiate")
    chosen = make_plan(schedule, rerun=2).plan
    assert chosen.rerun == {1, 3} and "run again in the backward" in " ".join(chosen.reasons)
    assert make_plan(schedule, rerun=3).plan.rerun == {1, 3, 5}
    assert make_plan(schedule, rerun=4).plan.rerun == {1, 2, 4, 6}
    assert make_plan(schedule, rerun=99).plan.rerun == set(range(1, len(schedule.stages) - 1))
    assert make_plan(schedule, rerun=2, keep=0).plan.rerun == {1, 3}, "for every backward the same"


@pytest.mark.parametrize("row", [1, 2, 3])
def test_rows_are_as_long_as_they_are_wanted(row: int) -> None:
    schedule = capture(Net(chain, depth=9), X).build("differentiate")
    wanted = reruns(len(schedule.stages), row)
    chosen = make_plan(schedule, rerun=wanted).plan.rerun
    line = "".join("r" if stage.index in chosen else " " for stage in schedule.stages)
    assert len(chosen) == wanted and max(map(len, line.split())) == row
    fewer = make_plan(schedule, rerun=wanted - 1).plan.rerun
    assert len(fewer) == wanted - 1


def test_what_several_stages_take_is_saved() -> None:
    every = frozenset(range(9))
    assert "1RERUN" in again(build(chain, Plan(frozenset({7}), rerun=frozenset({1}))))
    assert "1RERUN" not in again(build(skips, Plan(rerun=every), depth=3))


def test_less_is_saved_and_weights_are_still_in_their_slots() -> None:
    plain, other = (
        build(chain, Plan(frozenset({7}), rerun=frozenset(which))) for which in ((), (2, 4))
    )
    assert len(other.saved_values) == len(plain.saved_values) - 2
    fetched = [
        len(ops.nodes_of(each.backward, ops.prefetch))
        for each in (plain, other)
        if each.backward is not None
    ]
    assert fetched[0] == fetched[1]


def test_another_argument_is_found() -> None:
    schedule = build(chain, Plan(frozenset({7}), rerun=frozenset({2})))
    assert schedule.backward is not None
    (node,) = ops.nodes_of(schedule.backward, ops.rerun)
    others = [n for n in schedule.backward.find_nodes(op="placeholder") if n.name.startswith("y")]
    (given,) = [n for n in node.all_input_nodes if n in others]
    node.replace_input_with(given, next(n for n in others if n is not given))
    with pytest.raises(ScheduleError, match=r"2RERUN takes y\d+_0 as argument"):
        verify(schedule)


# Numbers.


def every_other(schedule: Schedule, keep_last: bool) -> Plan:
    """Every other stage runs again; what the others give waits on the host."""
    count = len(schedule.stages)
    keep = frozenset({count - 1} if keep_last and schedule.stages[-1].traced.has_backward else ())
    return Plan(keep, offload=frozenset(range(count - 1)), rerun=frozenset(range(1, count - 1, 2)))


def all_in_a_row(schedule: Schedule, keep_last: bool) -> Plan:
    return replace(every_other(schedule, keep_last), rerun=frozenset(range(len(schedule.stages))))


NAMES = ("demo gpt", "batch norm", "shared layer", "tied", "dropout")


@pytest.mark.parametrize("plan", [every_other, all_in_a_row])
@pytest.mark.parametrize("name", drawn(NAMES[2:4], (*NAMES[:2], *NAMES[4:])))
def test_bitwise_the_plain_model(
    name: str, plan: Callable[[Schedule, bool], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, plan)
    case = cases.build(name)
    plain, model = twins(case.model, lookahead=1)
    for i in range(2):
        for each in (plain, model):
            torch.manual_seed(i)
            case.loss(each, i, CPU).backward()
        assert_same(plain, model)
    (schedule,) = schedules(model)
    changes = name == "batch norm"  # every other of its stages does, its statistics
    assert bool(again(schedule)) == (not changes or plan is all_in_a_row)


def test_a_backward_of_other_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, every_other)
    torch.manual_seed(0)
    plain, model = twins(Two(), lookahead=1)
    x = zoo.batch()["x"]
    for each in (plain, model):
        each(x)[1].sum().backward()
    assert_same(plain, model)
