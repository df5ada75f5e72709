"""`make_plan`: the last stage is kept, every other one is recomputed."""

from __future__ import annotations

import functools
from typing import Any

from megacompile.ir import Plan
from megacompile.passes.plan import make_plan
from tests.actions import apply, parse


def plan(line: str, *, keep: int = 1, **stubs: Any) -> Plan:
    schedule = parse(line, **stubs)
    return apply(functools.partial(make_plan, keep=keep), schedule).plan


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
