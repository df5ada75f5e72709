"""The stages of a planned step as people look at them: those that are alike in one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from megacompile.cost.ops import node_s
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.plan.scenario import Scenario
from megacompile.text import printable


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Stages in a row with the same template that are treated alike. Seconds are of one stage."""

    first: int
    last: int
    names: str  # module paths, "layers.1 ... layers.27"
    template: int
    parameter_bytes: int  # of one stage
    treatment: str  # "kept", "recomputed", ...
    forward_s: float
    recompute_s: float
    backward_s: float


def stage_groups(now: Scenario) -> tuple[StageGroup, ...]:
    """The stages of a step, in the order of their forwards."""
    order = {
        id(template): index
        for index, template in enumerate(
            dict.fromkeys(t for schedule in now.schedules for t in schedule.templates)
        )
    }
    found = []
    for schedule in now.schedules:
        times = _seconds(schedule, now)

        def alike(
            stage: Stage,
            schedule: Schedule = schedule,
            times: Mapping[tuple[int, str], float] = times,
        ) -> tuple[int, str, tuple[float, ...]]:
            mine = tuple(times.get((stage.index, name), 0.0) for name in _COMPUTES)
            return order[id(stage.traced)], _treatment(schedule, stage), mine

        for (template, treatment, mine), group in groupby(schedule.stages, alike):
            stages = list(group)
            names = [stages[0].name, stages[-1].name] if len(stages) > 1 else [stages[0].name]
            found.append(
                StageGroup(
                    stages[0].index,
                    stages[-1].index,
                    printable(" ... ".join(names)),
                    template,
                    sum(bucket.size_bytes for bucket in stages[0].buckets),
                    treatment,
                    *mine,
                )
            )
    return tuple(found)


_COMPUTES = ("forward", "recompute", "backward")


def _seconds(schedule: Schedule, now: Scenario) -> dict[tuple[int, str], float]:
    """By stage and compute."""
    found: dict[tuple[int, str], float] = {}
    for graph in schedule.graphs.values():
        for node in ops.nodes_that(graph, lambda op: op.code):
            stage: Stage = ops.arguments(node)[0]
            found[stage.index, ops.effects(node).name] = node_s(node, now.hardware, fused=now.fused)
    return found


def _treatment(schedule: Schedule, stage: Stage) -> str:
    plan = schedule.plan
    keys = {bucket.key for bucket in stage.buckets}
    if schedule.backward is None or not stage.traced.has_backward:
        words = ["forward only"]
    elif stage.index in plan.keep:
        words = ["half kept" if stage.index in dict(plan.saved_fractions) else "kept"]
    else:
        words = ["recomputed, offloaded" if stage.index in plan.offload else "recomputed"]
    if keys and keys <= plan.resident:
        words.append("resident")
    if keys & plan.device_update:
        words.append("updated on the device")
    return ", ".join(words)
