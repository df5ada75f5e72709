"""The stages of a planned step as people look at them: those that are alike in one row.

Stages that alternate are two rows: `0 2 4` are treated so, `1 3 5` so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacompile.cost.ops import node_s
from megacompile.ir import ops
from megacompile.ir.plan import SavedPart, Tier
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.plan.scenario import Scenario
from megacompile.text import printable

_Alike = tuple[int, str, tuple[float, ...]]  # template, treatment, seconds


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Stages with the same template that are treated alike. Seconds are of one stage."""

    graph: int  # that they are of, of the captured ones, from 1
    first: int
    last: int
    count: int  # fewer than from first to last, where they alternate with others
    names: str  # module paths, "layers.1 ... layers.27"
    template: int
    parameter_bytes: int  # of one stage
    treatment: str  # "kept", "recomputed", ...
    forward_s: float
    recompute_s: float
    backward_s: float


def stage_groups(now: Scenario) -> tuple[StageGroup, ...]:
    """The stages of a step, in the order of their forwards: those that are alike and come one after
    the other, or alternate with those of one row."""
    templates = dict.fromkeys(t for schedule in now.schedules for t in schedule.templates)
    order = {id(template): index for index, template in enumerate(templates)}
    found: list[StageGroup] = []
    for graph, schedule in enumerate(now.schedules, start=1):
        times = _seconds(schedule, now)
        rows: list[tuple[_Alike, list[Stage]]] = []
        for stage in schedule.stages:
            mine = tuple(times.get((stage.index, name), 0.0) for name in _COMPUTES)
            alike = order[id(stage.traced)], _treatment(schedule, stage), mine
            row = next((stages for known, stages in rows[-2:] if known == alike), None)
            if row is None:
                rows.append((alike, [stage]))
            else:
                row.append(stage)
        found += [_group(graph, alike, stages) for alike, stages in rows]
    return tuple(found)


def _group(graph: int, alike: _Alike, stages: Sequence[Stage]) -> StageGroup:
    (template, treatment, times), first, last = alike, stages[0], stages[-1]
    return StageGroup(
        graph,
        first.index,
        last.index,
        len(stages),
        printable(first.name if first is last else f"{first.name} ... {last.name}"),
        template,
        sum(bucket.size_bytes for bucket in first.buckets),
        treatment,
        *times,
    )


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
    row = plan.stages[stage.index]
    keys = {bucket.key for bucket in stage.buckets}
    if schedule.backward is None or not stage.traced.has_backward:
        words = ["forward only"]
    elif row.saved is SavedPart.INPUTS:
        words = [row.saved.value, *(["offloaded"] if row.tier is not Tier.DEVICE else [])]
    else:
        words = [row.saved.value + (" on the host" if row.tier is not Tier.DEVICE else "")]
    if row.tiles > 1:
        words.append(f"{'whole in ' if row.samples else ''}{row.tiles} tiles")
    if keys and keys <= plan.resident:
        words.append("resident")
    if keys & plan.device_update:
        words.append("updated on the device")
    return ", ".join(words)
