"""The findings about a planned step, as data: every figure that an explanation shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megacompile.cost.hardware import SHORT
from megacompile.cost.ops import node_s
from megacompile.cost.ranks import RankRates, SlowRate, slow_rates
from megacompile.cost.simulate import Prediction
from megacompile.ir import ops
from megacompile.ir.plan import SavedPart, Tier
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.log import CodeCounts
from megacompile.plan.alternatives import Change
from megacompile.plan.scenario import Scenario
from megacompile.text import printable
from megacompile.views.critical_path import (
    NONE,
    LastRank,
    RankSteps,
    StepFigures,
    last_rank,
    traced_steps,
)
from megacompile.views.timeline import Timeline

_SHORTER = 0.01  # of a step; a slow rank that costs less does not matter


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


@dataclass(frozen=True, slots=True)
class Memory:
    """The needs of a memory, by user."""

    kinds: dict[str, int]
    needed_bytes: int
    available_bytes: int | None  # None: not known
    when: str = ""  # the op at the peak

    @property
    def fits(self) -> bool | None:
        """None: not known."""
        return None if self.available_bytes is None else self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a model has read from its disk and written to it so far.

    Reads through mappings, as by `state_dict()`, are not counted.
    """

    read_bytes: int
    written_bytes: int
    steps: int  # of optimizers over its parameters, that have begun meanwhile


@dataclass(frozen=True, slots=True)
class DiskTraffic:
    """Traffic between host memory and a disk, which writes wear; bytes."""

    read_bytes: int  # in each step, by the plan
    written_bytes: int
    so_far: Moved | None = None  # measured; None: it is a plan alone


@dataclass(frozen=True, slots=True)
class Busy:
    """One stream over a step."""

    stream: str
    predicted_s: float
    waited_s: float  # of the step's time, what its end waited for this stream
    traced_s: float | None  # a step, where a trace was taken
    traced_waited_s: float | None  # of that step's time, what its end waited for this stream

    @property
    def works(self) -> bool:
        return bool(self.predicted_s or self.traced_s)


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rate at which ranks are behind, and what that costs."""

    rate: SlowRate
    shorter: float  # the share by which a step is shorter at the others' rate, by prediction

    @property
    def matters(self) -> bool:
        """True if the step waits for it."""
        return self.shorter >= _SHORTER


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
    disk: Memory | None  # None: there is none
    reasons: tuple[str, ...]
    step_s: float  # predicted
    traced_step_s: float | None
    traced_none_s: float | None  # of it, where no recorded op was what the step waited for
    streams: tuple[Busy, ...]
    bounds: dict[str, float]  # resource -> its share of the step's time, the largest first
    changes: tuple[Change, ...]
    budgets: tuple[Change, ...]  # what a tenth more of each would buy
    locked_bytes: int | None = None  # of host memory, page-locked; None: nothing has to be
    page_locked: Memory | None = None  # what is to be, and what can be; None: no limit is known
    pageable_s: float = 0.0  # of a step: what it costs that less can be
    numa_node: str | None = None  # near the GPU, where its host memory is; None: there is one
    ranks: int = 1  # that share the model; memory and times are those of one
    replicas: int = 1  # how many ranks have the same part of it
    network_gb_s: float | None = None  # what one gets from the others of these; None: no replicas
    network_is_assumed: bool = False  # it was neither measured nor told
    hosts: tuple[str, ...] = ()  # theirs, where ranks share the model and their rates are known
    slow_ranks: tuple[SlowRank, ...] = ()  # rates at which some are behind, what costs most first
    last_rank: LastRank | None = None  # whom the others wait for, where all ranks were traced
    disk_traffic: DiskTraffic | None = None  # None: nothing is on a disk
    code: dict[str, CodeCounts] = field(default_factory=dict)  # by kind: what was compiled, if any

    @classmethod
    def of(
        cls,
        now: Scenario,
        *,
        model: str,
        parameters: int,
        traced: Timeline | None = None,
        changes: Sequence[Change] = (),
        budgets: Sequence[Change] = (),
        locked_bytes: int | None = None,
        numa_node: str | None = None,
        rates: Sequence[RankRates] = (),
        rank_steps: Sequence[RankSteps] = (),
        code: Mapping[str, CodeCounts] | None = None,
        moved: Moved | None = None,
    ) -> Self:
        """The findings about a step.

        Args:
            now: the step.
            model: its class.
            parameters: how many it has.
            traced: what ran in a trace, of whole steps; from the second one on, where there are
                two.
            changes: what would help; see `megacompile.plan.alternatives`.
            budgets: what a tenth more of each memory would bring; see there too.
            locked_bytes: of host memory that is page-locked. Default: what can be, where that is
                known.
            numa_node: near the GPU, of several: "1 of 2".
            rates: of each of the ranks that share the model; the slowest are those of `now`.
            rank_steps: what each of them has traced.
            code: what was compiled, by kind.
            moved: from and to the disk so far.
        """
        peak, device = now.device.peak, now.device_kinds()
        host, disk, planned = now.host(), now.disk(), now.disk_traffic()
        needed, limit = sum(host.values()), now.hardware.locked_bytes
        if limit is not None and locked_bytes is None:
            locked_bytes = min(limit, needed)
        steps = None if traced is None else traced_steps(traced, model)
        return cls(
            model=model,
            hardware=now.hardware.name,
            parameters=parameters,
            templates=len({id(t) for schedule in now.schedules for t in schedule.templates}),
            stages=stage_groups(now),
            device=Memory(
                device, peak.total_bytes, now.device_bytes, f"{peak.graph} {peak.label}".strip()
            ),
            host=Memory(host, needed, now.host_bytes),
            disk=Memory(disk, sum(disk.values()), now.disk_bytes)
            if disk or now.disk_bytes
            else None,
            reasons=_reasons([schedule.plan.reasons for schedule in now.schedules]),
            step_s=now.step_s,
            traced_step_s=None if steps is None else steps.step_s,
            traced_none_s=None if steps is None else steps.waited_s.get(NONE, 0.0),
            streams=_streams(now.timeline(), steps),
            bounds=now.bounds(),
            changes=tuple(changes),
            budgets=tuple(budgets),
            locked_bytes=locked_bytes,
            page_locked=None if limit is None else Memory({}, needed, limit),
            pageable_s=now.pageable_s if now.pageable_bytes else 0.0,
            numa_node=numa_node,
            ranks=now.ranks,
            replicas=now.replicas,
            network_gb_s=now.hardware.replicas_gb_s if now.replicas > 1 else None,
            network_is_assumed=now.replicas > 1 and now.hardware.network_gb_s is None,
            hosts=tuple(dict.fromkeys([r.host for r in rates] + [r.host for r in rank_steps])),
            slow_ranks=_slow_ranks(now, rates),
            last_rank=last_rank(rank_steps),
            disk_traffic=DiskTraffic(planned[Stream.READ], planned[Stream.WRITE], moved)
            if disk
            else None,
            code={
                kind: copy(counts) for kind, counts in (code or {}).items() if not counts.is_none
            },
        )

    @property
    def bound(self) -> str:
        """The bound of the step: compute, h2d, d2h, host memory bandwidth, host update, disk or,
        where ranks share the model, interconnect or network (between those with the same part)."""
        return next(iter(self.bounds))

    @property
    def traced_bound(self) -> str | None:
        """The stream that the traced steps waited for most ("host": the host's update).

        Whom a step waits for is not always who is busiest; see `megacompile.views.critical_path`.
        """
        waits = self.traced_waits
        return max(waits, key=waits.__getitem__) if waits else None

    @property
    def traced_waits(self) -> dict[str, float]:
        """The share of the traced step's time that its end waited for each stream; {}: no trace."""
        step_s = self.traced_step_s
        found = {
            row.stream: row.traced_waited_s / step_s
            for row in self.streams
            if step_s and row.traced_waited_s is not None
        }
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def traced_busiest(self) -> str | None:
        """The stream that had work for most of the traced steps' time."""
        busy = {row.stream: row.traced_s for row in self.streams if row.traced_s is not None}
        return max(busy, key=lambda name: busy[name] or 0.0) if busy else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has. Seconds and bytes."""
        found = asdict(self)
        for name in ("device", "host", "disk", "page_locked"):
            if (memory := getattr(self, name)) is not None:
                found[name]["fits"] = memory.fits
        bounds = {"bound": self.bound, "traced_bound": self.traced_bound}
        return {**found, **bounds, "traced_waits": self.traced_waits}


def _streams(timeline: Prediction, steps: StepFigures | None) -> tuple[Busy, ...]:
    """Those that work; of the idle ones computes and copies too."""
    rows = {
        lane: Busy(
            lane.value,
            timeline.busy_s(lane),
            timeline.critical_s.get(lane, 0.0),
            None if steps is None else steps.busy_s.get(lane.value, 0.0),
            None if steps is None else steps.waited_s.get(lane.value, 0.0),
        )
        for lane in Stream
    }
    return tuple(row for lane, row in rows.items() if row.works or lane.in_every_step)


def _slow_ranks(now: Scenario, ranks: Sequence[RankRates]) -> tuple[SlowRank, ...]:
    """The rates at which ranks are behind the others, the most costly first.

    Plans are made with the slowest rates of all ranks. The simulation says what a slow rank costs:
    it runs the same step with the rate that the others have.
    """
    found = []
    for rate in slow_rates(ranks):
        step_s = now.timeline(rate.at_median(now.hardware)).step_s
        found.append(SlowRank(rate, max(0.0, 1 - step_s / now.step_s) if now.step_s else 0.0))
    return tuple(sorted(found, key=lambda each: -each.shorter))


def _reasons(plans: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Those of all plans; where not all of several graphs have one, it says which do.

    Page-locked memory is that of the whole model: the plan of the last graph knows of all.
    """
    graphs: dict[str, list[int]] = {}
    for i, reasons in enumerate(plans, start=1):
        for reason in dict.fromkeys(reasons):
            graphs.setdefault(reason, []).append(i)
    short = [reason for reason in graphs if reason.startswith(SHORT)]
    last = max(short, key=lambda reason: graphs[reason][-1], default=None)
    found = []
    for reason, of in graphs.items():
        everywhere = len(of) == len(plans) or reason == last
        if everywhere or reason not in short:
            which = "graph" if len(of) == 1 else "graphs"
            found.append(reason if everywhere else f"{which} {', '.join(map(str, of))}: {reason}")
    return tuple(found)


# Stages in rows: those that are alike. Stages that alternate are two rows: `0 2 4` are treated so,
# `1 3 5` so.

_Alike = tuple[int, str, tuple[float, ...]]  # template, treatment, seconds


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
