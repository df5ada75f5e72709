"""Passes take time in proportion to a model's layers: those of 72 B have 80, and plans are many."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megacompile.ir.schedule import Plan, Schedule
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.offload_grad import offload_gradients
from megacompile.passes.schedule.prefetch import insert_prefetch
from megacompile.passes.schedule.recompute import insert_recompute
from megacompile.passes.schedule.slots import assign_slots
from megacompile.passes.schedule.tokens import insert_tokens
from megacompile.passes.schedule.update_graph import insert_update_graph
from tests.actions import parse

Pass = Callable[[Schedule], Schedule]
PASSES: dict[str, Pass] = {
    "recompute": insert_recompute,
    "offload_grad": functools.partial(offload_gradients, accumulate=False),
    "update_graph": functools.partial(insert_update_graph, helps=True),
    "prefetch": functools.partial(insert_prefetch, lookahead=1),
    "slots": functools.partial(assign_slots, slots=3, reuse=True),
    "free": insert_free,
    "tokens": insert_tokens,
}


def chain(stages: int) -> Schedule:
    forward = " ".join(f"{k}F" for k in range(stages))
    backward = " ".join(f"{k}B" for k in reversed(range(stages)))
    return replace(parse(f"{forward} | {backward}", saved=40), plan=Plan(frozenset({stages - 1})))


@functools.cache
def calls(stages: int) -> dict[str, int]:
    """By pass: the function calls that it makes, those of generators' items among them."""
    schedule = chain(stages)
    counts: dict[str, int] = {}
    for name, function in PASSES.items():
        counts[name] = 0

        def note(frame: Any, event: str, argument: Any, name: str = name) -> None:
            counts[name] += event in ("call", "c_call")

        gc.disable()  # finalizers of other tests' objects are calls, too
        sys.setprofile(note)
        try:
            schedule = function(schedule)
        finally:
            sys.setprofile(None)
            gc.enable()
    return counts


@pytest.mark.parametrize("name", PASSES)
def test_twice_the_layers_take_twice_the_time(name: str) -> None:
    small, middle, large = (calls(stages)[name] for stages in (20, 40, 80))
    assert large - middle < 2.15 * (middle - small)
