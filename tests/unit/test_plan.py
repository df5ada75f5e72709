"""`make_plan`: which stages are kept, in part or whole, recomputed, and wait on the host."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megacompile.ir.schedule import Plan
from megacompile.passes.schedule.plan import make_plan
from tests.actions import apply, parse


def plan(
    line: str,
    *,
    keep: int = 1,
    halves: bool = False,
    activations: str = "auto",
    lookahead: int = 1,
    **stubs: Any,
) -> Plan:
    make = functools.partial(
        make_plan, keep=keep, halves=halves, activations=activations, lookahead=lookahead
    )
    return apply(make, parse(line, **stubs)).plan


def test_the_last_stage_is_kept() -> None:
    made = plan("0F 1F 2F | 2B 1B 0B")
    assert made.keep == {2}
    assert made.reasons == ("stage 2 (unit 2) is kept: its backward comes next",)


def test_nothing_is_kept_where_the_caller_says_so() -> None:
    assert plan("0F 1F 2F | 2B 1B 0B", keep=0).keep == frozenset()


def test_a_last_stage_without_a_backward_is_not_kept() -> None:
    made = plan("0F 1F 2F | 1B 0B", frozen=(2,))
    assert made.keep == frozenset()
    assert made.reasons == ("stage 2 (unit 2) has no backward: nothing to keep",)


def test_a_forward_alone_keeps_nothing() -> None:
    assert plan("0F 1F 2F").keep == frozenset()


def test_the_last_stages_with_a_backward_are_kept() -> None:
    made = plan("0F 1F 2F 3F | 3B 2B 1B 0B", keep=3)
    assert made.keep == {1, 2, 3}
    assert made.reasons == ("stages 1 to 3 are kept: there is room",)
    assert plan("0F 1F 2F | 1B 0B", keep=2, frozen=(2,)).keep == {0, 1}
    assert plan("0F 1F 2F | 2B 1B 0B", keep=9).keep == {0, 1, 2}


CHAIN = "0F 1F 2F 3F | 3B 2B 1B 0B"


def test_the_default_recomputes() -> None:
    assert plan(CHAIN) == plan(CHAIN, activations="recompute")
    assert not plan(CHAIN).offload and not plan(CHAIN).saved_fractions


def test_everything_that_has_a_backward_is_kept() -> None:
    made = plan("0F 1F 2F 3F | 3B 2B 1B", activations="keep", frozen=(0,))
    assert made.keep == {1, 2, 3} and made.saved_fractions == ()
    assert made.reasons == ("every stage is kept: activations='keep'",)


def test_the_last_stage_is_kept_whole() -> None:
    made = plan(CHAIN, activations="selective")
    assert made.keep == {0, 1, 2, 3}
    assert made.saved_fractions == ((0, 0.5), (1, 0.5), (2, 0.5))
    assert made.reasons[-1] == "all but the last save 50% of it, and compute the rest again"
    assert plan("0F | 0B", activations="selective").saved_fractions == ()


def test_some_stages_keep_half() -> None:
    made = plan(CHAIN, keep=3, halves=True)
    assert made.keep == {1, 2, 3} and made.saved_fractions == ((1, 0.5), (2, 0.5))
    assert made.reasons[-1] == "all but the last save 50% of it, and compute the rest again"
    for alone in (plan(CHAIN, keep=1, halves=True), plan(CHAIN, keep=0, halves=True)):
        assert alone.saved_fractions == ()


@pytest.mark.parametrize(("lookahead", "offload"), [(1, {0, 1}), (2, {0}), (3, set()), (9, set())])
def test_the_first_stages_of_the_backward_stay_on_the_device(
    lookahead: int, offload: set[int]
) -> None:
    made = plan(CHAIN, activations="offload", lookahead=lookahead)
    assert made.offload == offload and made.keep == {3}


def test_what_waits_on_the_host_says_why() -> None:
    assert plan(CHAIN, activations="offload").reasons[1] == (
        "saved tensors of stages 0 to 1 wait on the host; the backward begins with the other 2"
    )
    assert plan(CHAIN, activations="offload", lookahead=7).reasons[1] == (
        "nothing waits on the host: the backward wants the saved tensors of all 4 stages too soon"
    )


@pytest.mark.parametrize("activations", ["keep", "selective", "offload"])
def test_a_backward_of_other_outputs_keeps_nothing_and_finds_the_same_on_the_host(
    activations: str,
) -> None:
    guessed = plan(CHAIN, activations=activations)
    made = plan(CHAIN, activations=activations, keep=0)
    assert made.keep == frozenset() and made.saved_fractions == ()
    assert made.offload == guessed.offload
