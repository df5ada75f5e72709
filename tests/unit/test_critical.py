"""The critical path of a step: on timelines by hand, and against the simulation's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from megacompile.cost.hardware import Hardware
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.simulate import simulate
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.views import critical_path
from megacompile.views.prediction import predicted_steps
from tests.draws import drawn
from tests.zoo import Stack, scheduled

MODEL = "Stack"


@cache
def made(activations: str = "auto") -> Schedule:
    return scheduled(Stack(layers=4), progress=False, lowering="eager", activations=activations)


BALANCED = Hardware("even", 1.0, 1.0, 0.8, 0.8, 1e-3, 1.0, 0.0, host_memory_gb_s=2, update_gb_s=4)
CASES = {
    "balanced": BALANCED,
    "h2d": replace(BALANCED, h2d_gb_s=0.02, h2d_both_gb_s=0.02),
    "d2h": replace(BALANCED, d2h_gb_s=0.02, d2h_both_gb_s=0.02),
    "compute": replace(BALANCED, matmul32_tflop_s=1e-6, memory_gb_s=1e-2),
    "host": replace(BALANCED, update_gb_s=0.1),
}


@pytest.mark.parametrize("name", drawn(["balanced", "h2d"], ["d2h", "compute", "host"]))
def test_it_finds_what_the_simulation_knows(name: str) -> None:
    """A trace of the simulated run has the simulation's critical path."""
    schedule = made("offload" if name in ("balanced", "d2h") else "recompute")
    optimizer = None if name == "d2h" else OptimizerCost()
    told = simulate(schedule, CASES[name], optimizer=optimizer, steps=4)
    traced = predicted_steps(schedule, CASES[name], optimizer, model=MODEL, steps=4)
    whole = critical_path.period(traced, MODEL)
    assert whole is not None and whole.steps == 3
    assert whole.step_s == pytest.approx(told.step_s, rel=0.02)
    last = critical_path.Period(whole.stop_s - told.step_s, whole.stop_s, 1)
    found = critical_path.waited_s(critical_path.critical_path(traced, MODEL, last))
    for lane in Stream:
        share, known = (
            x / told.step_s for x in (found.get(lane.value, 0.0), told.critical_s[lane])
        )
        assert share == pytest.approx(known, abs=0.03), f"{lane}: {found}, {told.critical_s}"
    assert sum(found.values()) == pytest.approx(last.stop_s - last.start_s)
    if name != "balanced":
        assert next(iter(found)) == name


# --- by hand: two steps whose schedule is that of `made`


GRAPHS = ("forward", "backward", "update")


@cache
def whole() -> Any:
    """A timeline of two steps, whose spans are moved by hand."""
    return predicted_steps(made(), BALANCED, OptimizerCost(), model=MODEL, steps=2)


def by_hand(*spans: tuple[str, str, float, float, int]) -> Any:
    """Spans as (name, lane, start, stop, run); runs are forward, backward, update, forward, ..."""
    named = {span.op.name: span for span in whole().spans}
    found = []
    for name, lane, start, stop, run in spans:
        assert named[name].op.lane == lane
        found.append(replace(named[name], start_s=start, stop_s=stop, run=run))
    count = max((span[-1] for span in spans), default=-1) + 1
    (one, *_) = whole().runs
    runs = [replace(one, graph=GRAPHS[i % 3]) for i in range(count)]
    return replace(whole(), spans=tuple(found), runs=tuple(runs))


def path(timeline: Any) -> list[tuple[str, float, float]]:
    return [
        (chunk.span.op.name if chunk.span else "-", chunk.start_s, chunk.stop_s)
        for chunk in critical_path.critical_path(timeline, MODEL)
    ]


def test_who_was_done_last_was_waited_for_if_it_was_waited_for_at_all() -> None:
    """A copy that ends just before an unrelated compute does not count as waited for."""
    spans = (
        ("0PREFETCH@0", "h2d", 0.0, 1.0, 0),
        ("1PREFETCH@1", "h2d", 1.0, 4.0, 0),
        ("2PREFETCH@2", "h2d", 4.0, 5.9, 0),
        ("0F", "compute", 1.0, 2.0, 0),
        ("1F", "compute", 4.5, 6.0, 0),
        ("2F", "compute", 6.0, 7.0, 0),
    )
    assert path(by_hand(*spans)) == [
        ("0PREFETCH@0", 0.0, 1.0),
        ("1PREFETCH@1", 1.0, 4.0),
        ("-", 4.0, 4.5),  # the host had not issued 1F
        ("1F", 4.5, 6.0),  # and not 2PREFETCH, though that ended right before 2F
        ("2F", 6.0, 7.0),
    ]
    found = critical_path.traced_steps(by_hand(*spans), MODEL)
    assert found is not None and found.step_s == 7.0
    assert found.waited_s == {"h2d": 4.0, "compute": 2.5, critical_path.NONE: 0.5}
    assert found.busy_s["h2d"] == pytest.approx(5.9)


def test_the_hosts_update_is_what_a_prefetch_waited_for() -> None:
    spans = (
        ("0F", "compute", 0.0, 1.0, 0),
        ("0B", "compute", 1.0, 2.0, 1),
        ("0OFFLOAD_GRAD", "d2h", 2.0, 2.5, 1),
        ("0UPDATE", "host", 2.5, 5.0, 2),
        ("1UPDATE", "host", 5.0, 7.0, 2),
        ("0PREFETCH@0", "h2d", 5.0, 5.5, 3),
        ("0F", "compute", 5.5, 6.0, 3),
        ("1PREFETCH@1", "h2d", 7.0, 7.5, 3),
        ("1F", "compute", 7.5, 8.0, 3),
        ("1B", "compute", 8.0, 9.0, 4),
    )
    timeline = by_hand(*spans)
    step = critical_path.period(timeline, MODEL)
    assert step == critical_path.Period(2.0, 9.0, 1)
    names = [name for name, _, _ in path(timeline)]
    assert names == ["0OFFLOAD_GRAD", "0UPDATE", "1UPDATE", "1PREFETCH@1", "1F", "1B"]
    assert critical_path.waited_s(critical_path.critical_path(timeline, MODEL))["host"] == 4.5


def test_what_ran_once_or_not_at_all() -> None:
    one = by_hand(("0F", "compute", 1.0, 2.0, 0), ("0B", "compute", 2.0, 4.0, 1))
    assert critical_path.period(one, MODEL) == critical_path.Period(1.0, 4.0, 1)
    assert critical_path.period(one, "another") is None
    assert critical_path.critical_path(one, "another") == []
    assert critical_path.traced_steps(one, "another") is None
    assert critical_path.traced_steps(by_hand(), MODEL) is None
    forwards = by_hand(*(("0F", "compute", 3.0 * i, 3.0 * i + 1, 3 * i) for i in range(3)))
    assert critical_path.period(forwards, MODEL) == critical_path.Period(1.0, 7.0, 2)
    assert critical_path.period(forwards, MODEL, last=1) == critical_path.Period(4.0, 7.0, 1)
