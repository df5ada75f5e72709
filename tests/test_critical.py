"""The way back from a step's end: on timelines by hand, and against what the simulation knows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from megacompile import critical, schedules
from megacompile.hardware import H200, Hardware
from megacompile.ir import Schedule
from megacompile.optimizer_cost import OptimizerCost
from megacompile.simulate import Lane, simulate
from megacompile.timeline import (
    HOST,
    UPDATE_ON_HOST,
    OpInfo,
    Run,
    Span,
    Timeline,
    describe,
    in_order,
)
from tests.zoo import Stack, batch, step, twins

MODEL = "Stack"


def made(**options: Any) -> Schedule:
    _, model = twins(Stack(layers=6), progress=False, **options)
    step(model, batch())
    return schedules(model)[0]


def as_traced(
    schedule: Schedule, hardware: Hardware, optimizer: OptimizerCost | None, steps: int = 4
) -> tuple[Timeline, Any]:
    """What a trace would have of a simulated run, and what the simulation says of it."""
    told = simulate(schedule, hardware, optimizer=optimizer, steps=steps, fused=False)
    names = {g: {i.name: i for i in describe(schedule, g)} for g in schedule.graphs}
    modules = {f"{b.label}UPDATE": b.name for b in schedule.buckets}
    runs = [Run(MODEL, graph, schedule) for _ in range(steps) for graph in ("forward", "backward")]
    spans = []
    for event in told.events:
        times = (event.start_s, event.stop_s, MODEL)
        if event.graph == "update":
            assert event.stream is Lane.HOST
            info = OpInfo(event.label, UPDATE_ON_HOST, HOST, modules[event.label])
            spans.append(Span(info, *times, -1))
        elif event.label in names[event.graph]:
            run = 2 * event.step + (event.graph == "backward")
            spans.append(Span(names[event.graph][event.label], *times, run))
    return Timeline(tuple(in_order(spans)), tuple(runs), "cpu"), told


BALANCED = Hardware("even", 1.0, 1.0, 0.8, 0.8, 1e-3, 1.0, 0.0, host_memory_gb_s=2, update_gb_s=4)
CASES = {
    "balanced": BALANCED,
    "h2d": replace(BALANCED, h2d_gb_s=0.02, h2d_both_gb_s=0.02),
    "d2h": replace(BALANCED, d2h_gb_s=0.02, d2h_both_gb_s=0.02),
    "compute": replace(BALANCED, matmul32_tflop_s=1e-6, memory_gb_s=1e-2),
    "host": replace(BALANCED, update_gb_s=0.1),
}


@pytest.mark.parametrize("activations", ["recompute", "offload"])
@pytest.mark.parametrize("name", CASES)
def test_it_finds_what_the_simulation_knows(name: str, activations: str) -> None:
    schedule = made(activations=activations)
    optimizer = None if name == "d2h" else OptimizerCost()
    traced, told = as_traced(schedule, CASES[name], optimizer)
    whole = critical.period(traced, MODEL)
    assert whole is not None and whole.steps == 3
    assert whole.step_s == pytest.approx(told.step_s, rel=0.02)
    last = critical.Period(whole.stop_s - told.step_s, whole.stop_s, 1)
    found = critical.waited_s(critical.critical_path(traced, MODEL, last))
    for lane in Lane:
        share, known = (x / told.step_s for x in (found.get(lane.value, 0.0), told.critical_s[lane]))
        assert share == pytest.approx(known, abs=0.03), f"{lane}: {found}, {told.critical_s}"
    assert sum(found.values()) == pytest.approx(last.stop_s - last.start_s)
    if name != "balanced":
        assert next(iter(found)) == name
