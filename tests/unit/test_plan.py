"""`make_plan`: which stages are kept fully or in half, recomputed, or wait on the host; and which
of their values are copied."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.ir import ops
from megacompile.ir.plan import Choice, Plan, SavedPart
from megacompile.verify.proof import verify
from tests.actions import apply, parse
from tests.capturing import capture
from tests.planned import PASSES, planned, rows
from tests.zoo import Tower

CHAIN = "0F 1F 2F 3F | 3B 2B 1B 0B"
LONG = "0F 1F 2F 3F 4F 5F 6F 7F | 7B 6B 5B 4B 3B 2B 1B 0B"
LAST_FROZEN = "0F 1F 2F | 1B 0B"


def plan(line: str, **given: Any) -> Plan:
    """What is chosen is one kept stage and a lookahead of one, if nothing else is said."""
    names = ("keep", "halves", "activations", "lookahead")
    default = {"keep": 1, "halves": False, "activations": "auto", "lookahead": 1}
    options = {name: given.pop(name, default[name]) for name in names}
    choice = Choice(options.pop("keep"), halves=options.pop("halves"))
    function = functools.partial(PASSES.make_plan, choice=choice, **options)
    return apply(function, parse(line, **given)).plan


def halved(plan: Plan) -> list[int]:
    return [i for i, row in enumerate(plan.stages) if row.saved is SavedPart.HALF]


@pytest.mark.parametrize(
    ("line", "given", "keep"),
    [
        (CHAIN, {}, {3}),
        (CHAIN, {"keep": 0}, set()),
        (CHAIN, {"keep": 3}, {1, 2, 3}),
        (CHAIN, {"keep": 9}, {0, 1, 2, 3}),
        ("0F 1F 2F", {}, set()),  # a forward alone
        (LAST_FROZEN, {"frozen": (2,), "keep": 2}, {0, 1}),
        ("0F 1F 2F 3F | 3B 2B 1B", {"activations": "keep", "frozen": (0,)}, {1, 2, 3}),
        (CHAIN, {"activations": "selective"}, {0, 1, 2, 3}),
        (CHAIN, {"keep": 3, "halves": True}, {1, 2, 3}),
    ],
)
def test_what_is_kept(line: str, given: dict[str, Any], keep: set[int]) -> None:
    """The last stages with a backward; with halves, all except the last one keep half."""
    made = plan(line, **given)
    assert made.keep == keep and not made.offload
    in_halves = given.get("halves") or given.get("activations") == "selective"
    halves = sorted(keep)[:-1] if in_halves else []
    assert halved(made) == halves
    assert plan(CHAIN) == plan(CHAIN, activations="recompute"), "the default"


@pytest.mark.parametrize(("lookahead", "offload"), [(1, {0, 1}), (2, {0}), (3, set()), (9, set())])
def test_the_first_stages_of_the_backward_stay_on_the_device(
    lookahead: int, offload: set[int]
) -> None:
    made = plan(CHAIN, activations="offload", lookahead=lookahead)
    assert made.offload == offload and made.keep == {3}
    guessed = plan(CHAIN, activations="offload", lookahead=lookahead, keep=0)
    assert not guessed.keep and guessed.offload == offload, "a backward of other outputs"


# On the host.


@pytest.mark.parametrize(
    ("count", "keep", "chosen"),
    [(2, 1, {1, 4}), (1, 4, {2}), (9, 5, {0, 1, 2})],
)
def test_stages_on_the_host_are_far_from_one_another(
    count: int, keep: int, chosen: set[int]
) -> None:
    """Before the kept stages and those that the backward begins with."""

    def on_host(count: int, lookahead: int) -> frozenset[int]:
        forward, *_ = LONG.partition(" |")
        saved: dict[str, Any] = {"keep": keep, "saved_on_host": count}
        return planned(forward, lookahead=lookahead, slots=lookahead + 1, **saved).plan.offload

    assert on_host(count, 1) == chosen
    assert not on_host(0, 1) and not on_host(count, 7)


def test_a_plan_keeps_half_of_what_stages_on_the_host_save() -> None:
    choice = Choice(2, saved_on_host=2)
    plan = PASSES.make_plan(parse(LONG), choice, lookahead=1).plan
    assert plan.keep == {1, 4, 6, 7}
    assert plan.offload == {1, 4}
    assert halved(plan) == [1, 4]
    assert plan.saved_delay == 3, "a copy has the time of three forwards"
    other = PASSES.make_plan(parse(LONG), choice, lookahead=1, saves=False).plan
    assert not other.keep and not halved(other), "a backward of other outputs"
    assert other.offload == plan.offload, "which finds the same on the host"


def test_what_stays_under_another_name_is_not_copied() -> None:
    """A relu saves its output. It is on the device for the next stage, or goes as its input."""
    layers = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(6))
    captured = capture(Tower(layers), torch.randn(2, 4))
    for on_host in (frozenset({1}), frozenset({1, 2})):
        schedule = captured.with_tangent()
        last = len(schedule.stages) - 1
        for name, function in captured.passes(lookahead=1).items():
            schedule = function(schedule)
            if name == "plan":
                plan = rows(last + 1, on_host | {last}, offload=on_host)
                schedule = replace(schedule, plan=plan)
        verify(schedule)
        of_stage = {stage.index: stage for stage in schedule.stages}
        assert of_stage[1].traced.saved, "there is what could be copied"
        copies = ops.nodes_of(schedule.forward, ops.offload_saved)
        names = [ops.arguments(copy)[1].name for copy in copies]
        assert any(name.startswith("s1_") for name in names) == (len(on_host) == 2)
