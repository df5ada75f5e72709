"""The findings about a planned step: every figure that an explanation shows, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megacompile.cost.ops import node_s
from megacompile.cost.places import device_kinds
from megacompile.cost.simulate import Prediction
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ParamRef, Stage
from megacompile.ir.stream import Stream
from megacompile.log import CodeCounts
from megacompile.plan.scenario import Change, Scenario
from megacompile.text import printable, short_count
from megacompile.views import critical_path
from megacompile.views.critical_path import LastRank, RankSteps, StepFigures
from megacompile.views.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StageGroup:
    """Stages with the same template and treatment. Times are of one stage."""

    graph: int  # number of the captured graph, from 1
    first: int
    last: int
    count: int  # less than last - first + 1 if others alternate with them
    names: str  # module paths, "layers.1 ... layers.27"
    template: int
    parameter_bytes: int  # of one stage
    treatment: str  # "kept", "recomputed", ...
    forward_s: float
    recompute_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Needed and available bytes of one memory."""

    kinds: dict[str, int]
    needed_bytes: int
    available_bytes: int | None  # None: unknown
    when: str = ""  # label of the op at the peak

    @property
    def fits(self) -> bool | None:
        """True if the needs fit; None: unknown."""
        return None if self.available_bytes is None else self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class DiskTraffic:
    """Bytes per step between host memory and a disk; writes wear it out."""

    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Busy and waiting times of a stream over a step."""

    stream: str
    predicted_s: float
    waited_s: float  # this stream's part of the step's critical path
    traced_s: float | None  # per step; None: no trace
    traced_waited_s: float | None  # the same of a traced step


@dataclass(frozen=True, slots=True, repr=False)
class Findings:
    """The findings about a planned step."""

    model: str
    hardware: str
    parameters: int
    templates: int
    stages: tuple[StageGroup, ...]
    device: Memory
    host: Memory
    disk: Memory | None  # None: no disk
    reasons: tuple[str, ...]
    step_s: float  # predicted
    traced_step_s: float | None
    traced_none_s: float | None  # part of it that waited for no recorded op
    streams: tuple[Busy, ...]
    bounds: dict[str, float]  # resource -> its share of the step's time, the largest first
    changes: tuple[Change, ...]
    page_locked: Memory | None = None  # needed, and the limit; None: limit unknown
    pageable_s: float = 0.0  # part of a step that pageable memory costs
    ranks: int = 1  # that share the model; memory and times are per rank
    replicas: int = 1  # ranks with the same shard
    network_gb_s: float | None = None  # per rank, between replicas; None: no replicas
    network_is_assumed: bool = False  # neither measured nor given
    last_rank: LastRank | None = None  # the rank that the others wait for; None: not traced
    disk_traffic: DiskTraffic | None = None  # None: nothing on a disk
    code: dict[str, CodeCounts] = field(default_factory=dict)  # compiled code, by kind

    @classmethod
    def of(
        cls,
        now: Scenario,
        *,
        model: str,
        parameters: int,
        traced: Timeline | None = None,
        changes: Sequence[Change] = (),
        rank_steps: Sequence[RankSteps] = (),
        code: Mapping[str, CodeCounts] | None = None,
    ) -> Self:
        """Collect the findings about a step.

        Args:
            now: the step.
            traced: a trace of whole steps; the first is ignored if there are more.
            rank_steps: the traced steps of each rank.
        """
        peak = now.device.peak
        device = device_kinds(peak, now.schedules, now.optimizer)
        host, disk, planned = now.host(), now.disk(), now.disk_traffic()
        needed, limit = sum(host.values()), now.hardware.locked_bytes
        steps = None if traced is None else critical_path.traced_steps(traced, model)
        return cls(
            model=model,
            hardware=now.hardware.name,
            parameters=parameters,
            templates=len({id(t) for schedule in now.schedules for t in schedule.templates}),
            stages=_stage_groups(now),
            device=Memory(
                device, peak.total_bytes, now.device_bytes, f"{peak.graph} {peak.label}".strip()
            ),
            host=Memory(host, needed, now.host_bytes),
            disk=Memory(disk, sum(disk.values()), now.disk_bytes)
            if disk or now.disk_bytes
            else None,
            reasons=(
                *_reasons([schedule.plan.reasons for schedule in now.schedules]),
                *_not_planned(now.schedules, parameters),
            ),
            step_s=now.step_s,
            traced_step_s=None if steps is None else steps.step_s,
            traced_none_s=None if steps is None else steps.waited_s.get(critical_path.NONE, 0.0),
            streams=_streams(now.timeline(), steps),
            bounds=now.bounds(),
            changes=tuple(changes),
            page_locked=None if limit is None else Memory({}, needed, limit),
            pageable_s=now.pageable_s,
            ranks=now.ranks,
            replicas=now.replicas,
            network_gb_s=now.hardware.replicas_gb_s if now.replicas > 1 else None,
            network_is_assumed=now.replicas > 1 and now.hardware.network_gb_s is None,
            last_rank=critical_path.last_rank(rank_steps),
            disk_traffic=DiskTraffic(planned[Stream.READ], planned[Stream.WRITE]) if disk else None,
            code={k: copy(n) for k, n in (code or {}).items() if n.found or n.made},
        )

    @property
    def bound(self) -> str:
        """The resource that bounds the step: compute, h2d, d2h, host memory bandwidth, host update,
        disk or, if ranks share the model, interconnect or network (between replicas)."""
        return next(iter(self.bounds))

    @property
    def traced_bound(self) -> str | None:
        """The stream that the traced steps waited for most ("host": the host's update), which is
        not always the busiest."""
        return next(iter(self.traced_waits), None)

    @property
    def traced_waits(self) -> dict[str, float]:
        """The share of each stream in the traced step's critical path; {} without a trace."""
        step_s = self.traced_step_s or math.inf
        waits = {r.stream: (r.traced_waited_s or 0.0) / step_s for r in self.streams}
        return dict(sorted(waits.items(), key=lambda item: -item[1])) if self.traced_step_s else {}

    def to_dict(self) -> dict[str, Any]:
        """All findings as JSON types, in seconds and bytes."""
        found = asdict(self)
        for name in ("device", "host", "disk", "page_locked"):
            if (memory := getattr(self, name)) is not None:
                found[name]["fits"] = memory.fits
        bounds = {"bound": self.bound, "traced_bound": self.traced_bound}
        return {**found, **bounds, "traced_waits": self.traced_waits}


def _streams(timeline: Prediction, steps: StepFigures | None) -> tuple[Busy, ...]:
    """A row for compute, for each direction of copies, and for every other stream with work."""
    found = []
    for lane in Stream:
        name, busy_s = lane.value, timeline.busy_s(lane)
        traced_s = None if steps is None else steps.busy_s.get(name, 0.0)
        waited_s = None if steps is None else steps.waited_s.get(name, 0.0)
        if busy_s or traced_s or lane.in_every_step:
            critical_s = timeline.critical_s.get(lane, 0.0)
            found.append(Busy(name, busy_s, critical_s, traced_s, waited_s))
    return tuple(found)


def _reasons(plans: Sequence[Sequence[str]]) -> Iterator[str]:
    """The reasons of all plans; a reason that not all graphs share names its graphs."""
    graphs: dict[str, list[int]] = {}
    for i, reasons in enumerate(plans, start=1):
        for reason in dict.fromkeys(reasons):
            graphs.setdefault(reason, []).append(i)
    for reason, of in graphs.items():
        which = f"graph{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}: "
        yield reason if len(of) == len(plans) else which + reason


def _not_planned(schedules: Sequence[Schedule], parameters: int) -> tuple[str, ...]:
    """A line with the number of parameters that no stage reads. Nothing if stages read all, or if
    they read packed parameters, whose components have a different number of elements."""
    read = {
        (stage.buckets[ref.bucket].key, ref.param): stage.buckets[ref.bucket].params[ref.param]
        for schedule in schedules
        for stage in schedule.stages
        for ref in stage.primals
        if isinstance(ref, ParamRef)
    }
    unread = parameters - sum(param.numel for param in read.values())
    if unread <= 0 or any(param.packed for param in read.values()):
        return ()
    return (
        f"{short_count(unread)} of {short_count(parameters)} parameters are read by no captured "
        "code: where other code reads them, its time and memory, their gradients and optimizer "
        "states are not in these figures",
    )


_COMPUTES = ("forward", "recompute", "backward")


def _stage_groups(now: Scenario) -> tuple[StageGroup, ...]:
    """Groups of stages that are alike, in the order of each group's first stage."""
    templates = dict.fromkeys(t for schedule in now.schedules for t in schedule.templates)
    order = {id(template): index for index, template in enumerate(templates)}
    found: list[StageGroup] = []
    for graph, schedule in enumerate(now.schedules, start=1):
        times: dict[tuple[int, str], float] = {}  # seconds by stage index and compute
        for nodes in schedule.graphs.values():
            for node in ops.nodes_that(nodes, lambda op: op.code):
                stage: Stage = ops.arguments(node)[0]
                time_s = node_s(node, now.hardware, fused=now.fused)
                times[stage.index, ops.effects(node).name] = time_s
        groups: dict[tuple[Any, ...], list[Stage]] = {}
        for stage in schedule.stages:
            mine = (times.get((stage.index, name), 0.0) for name in _COMPUTES)
            alike = order[id(stage.traced)], _treatment(schedule, stage), *mine
            groups.setdefault(alike, []).append(stage)
        for (template, *treated), stages in groups.items():
            first, last = stages[0], stages[-1]
            names = first.name if first is last else f"{first.name} ... {last.name}"
            which = (graph, first.index, last.index, len(stages), printable(names), template)
            size_bytes = sum(bucket.size_bytes for bucket in first.buckets)
            found.append(StageGroup(*which, size_bytes, *treated))
    return tuple(found)


def _treatment(schedule: Schedule, stage: Stage) -> str:
    plan = schedule.plan
    keys = {bucket.key for bucket in stage.buckets}
    trains = schedule.backward is not None and stage.traced.has_backward
    words = [plan.stages[stage.index].treatment if trains else "forward only"]
    if keys and keys <= plan.resident:
        words.append("resident")
    if keys & plan.device_update:
        words.append("updated on the device")
    return ", ".join(words)
