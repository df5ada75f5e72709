"""`make_plan`: which stages are kept, in part or whole, recomputed, and wait on the host."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megacompile.ir.schedule import Plan
from megacompile.passes.schedule.plan import make_plan
from tests.actions import apply, parse

CHAIN = "0F 1F 2F 3F | 3B 2B 1B 0B"
LAST_FROZEN = "0F 1F 2F | 1B 0B"


def plan(line: str, **given: Any) -> Plan:
    """What is chosen is one kept stage and a lookahead of one, if nothing else is said."""
    names = ("keep", "halves", "activations", "lookahead")
    default = {"keep": 1, "halves": False, "activations": "auto", "lookahead": 1}
    choice = {name: given.pop(name, default[name]) for name in names}
    return apply(functools.partial(make_plan, **choice), parse(line, **given)).plan


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
    """The last stages with a backward; all but the last one in halves, where that is asked for."""
    made = plan(line, **given)
    assert made.keep == keep and not made.offload
    in_halves = given.get("halves") or given.get("activations") == "selective"
    halves = tuple((stage, 0.5) for stage in sorted(keep)[:-1]) if in_halves else ()
    assert made.saved_fractions == halves
    assert plan(CHAIN) == plan(CHAIN, activations="recompute"), "the default"


@pytest.mark.parametrize(("lookahead", "offload"), [(1, {0, 1}), (2, {0}), (3, set()), (9, set())])
def test_the_first_stages_of_the_backward_stay_on_the_device(
    lookahead: int, offload: set[int]
) -> None:
    made = plan(CHAIN, activations="offload", lookahead=lookahead)
    assert made.offload == offload and made.keep == {3}
    assert any("host" in reason for reason in made.reasons), "it says what waits, or that none does"


@pytest.mark.parametrize("activations", ["keep", "selective", "offload"])
def test_a_backward_of_other_outputs_keeps_nothing_and_finds_the_same_on_the_host(
    activations: str,
) -> None:
    guessed = plan(CHAIN, activations=activations)
    made = plan(CHAIN, activations=activations, keep=0)
    assert made.keep == frozenset() and made.saved_fractions == ()
    assert made.offload == guessed.offload
