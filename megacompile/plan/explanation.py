"""What a planned step does and why, on one screen: `megacompile.explain` and `plan`.

Sections of titles and rows; a terminal gets columns, a notebook tables, a program a dictionary.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any

from megacompile.code_counts import CodeCounts
from megacompile.cost.memory import Kind
from megacompile.cost.pageable import SHORT
from megacompile.cost.simulate import Prediction
from megacompile.cost.slowest import RankRates
from megacompile.ir.stream import Stream
from megacompile.plan.report import (
    Section,
    as_html,
    as_lines,
    as_text,
    duration,
    percent,
    short_count,
)
from megacompile.plan.scenario import Change, Scenario, budgets, changes
from megacompile.plan.slow_ranks import SlowRank, is_felt, last_text, slow_ranks
from megacompile.plan.stage_groups import StageGroup, stage_groups
from megacompile.text import format_bytes
from megacompile.tracing.critical_path import NONE, Steps, traced_steps
from megacompile.tracing.rank_steps import LastRank, RankSteps, last_rank
from megacompile.tracing.timeline import Timeline as Traced

_ALL = 1.05  # of a step's time; a little more is rounding
_ROWS = 8  # groups of stages that are shown
_PARTS: dict[str, tuple[Kind, ...]] = {  # rows of the table of memory
    "parameters": (Kind.PARAMETERS,),
    "masters": (Kind.MASTERS,),
    "gradients": (Kind.GRADIENTS,),
    "optimizer states": (Kind.STATES,),
    "saved tensors": (Kind.ACTIVATIONS, Kind.SAVED),
    "buffers": (Kind.SLOTS, Kind.INPUTS, Kind.WORKSPACE, Kind.STAGED),
}
_TENTH = "with a tenth more of one resource"
_EXPLAINED = 0.02  # a resource that is responsible for less is left out


@dataclass(frozen=True, slots=True)
class Memory:
    """What needs what of a memory."""

    kinds: dict[str, int]
    needed_bytes: int
    there_bytes: int | None  # None: not known
    when: str = ""  # the op at the peak

    @property
    def fits(self) -> bool | None:
        """None: not known."""
        return None if self.there_bytes is None else self.needed_bytes <= self.there_bytes


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
    """What goes between host memory and a disk, which writes wear; bytes."""

    read_bytes: int  # in each step, by the plan
    written_bytes: int
    so_far: Moved | None = None  # measured; None: it is a plan alone

    def lines(self) -> list[str]:
        """For a terminal."""
        reads, writes = format_bytes(self.read_bytes), format_bytes(self.written_bytes)
        found = [f"by the plan each step reads {reads} and writes {writes}"]
        if self.so_far is not None:
            reads, writes = map(format_bytes, (self.so_far.read_bytes, self.so_far.written_bytes))
            found.append(f"{self.so_far.steps} steps so far: {reads} read and {writes} written")
        return found


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


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """See `megacompile.explain`. `str()` is for a terminal, `to_dict()` for programs."""

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
    disk_traffic: DiskTraffic | None = None  # None: nothing lies on a disk
    code: dict[str, CodeCounts] = field(default_factory=dict)  # by kind: what was compiled, if any

    @property
    def bound(self) -> str:
        """What bounds the step: compute, h2d, d2h, host memory bandwidth, host update, disk or,
        where ranks share the model, interconnect or network (between those with the same part)."""
        return next(iter(self.bounds))

    @property
    def traced_bound(self) -> str | None:
        """The stream that the traced steps waited for most ("host": the host's update).

        Whom a step waits for is not always who is busiest; see `megacompile.tracing.critical_path`.
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

    def memory_rows(self) -> list[list[str]]:
        """Where every part lies: bytes of the device, of the host and, with one, of the disk. Where
        page-locked memory is known to be limited, it is one more of them."""
        tiers = {"device": self.device, "host": self.host}
        if self.disk is not None:
            tiers["disk"] = self.disk
        if self.page_locked is not None:
            tiers["page-locked"] = self.page_locked

        def one(part: str, tier: str, text: str) -> list[str]:
            return [part, *(text if name == tier else "" for name in tiers)]

        rows = [["memory", *tiers]]
        for part, kinds in _PARTS.items():
            sizes = [sum(m.kinds.get(kind.value, 0) for kind in kinds) for m in tiers.values()]
            if any(sizes):
                rows.append([part, *(format_bytes(size) if size else "" for size in sizes)])
        rows.append(["needed", *(format_bytes(m.needed_bytes) for m in tiers.values())])
        available = [memory.there_bytes for memory in tiers.values()]
        rows.append(["available", *("?" if n is None else format_bytes(n) for n in available)])
        if self.page_locked is not None and self.page_locked.fits is False:
            short = self.page_locked.needed_bytes - (self.page_locked.there_bytes or 0)
            rows.append(one("stay pageable", "page-locked", format_bytes(short)))
            rows.append(one("which costs a step", "page-locked", duration(self.pageable_s)))
        elif self.page_locked is None and self.locked_bytes is not None:
            rows.append(one("page-locked", "host", format_bytes(self.locked_bytes)))
        if self.numa_node is not None:
            rows.append(one("NUMA node", "host", self.numa_node))
        return rows

    def bounds_text(self) -> str:
        """ "compute 71 %, host update 20 %": what the step's time depends on."""
        shown = [(name, s) for name, s in self.bounds.items() if s >= _EXPLAINED]
        return ", ".join(f"{name} {share:.0%}" for name, share in shown) or "nothing of these"

    def network_lines(self) -> list[str]:
        """At which rate ranks with the same rows sum gradients; [] without these."""
        if self.network_gb_s is None:
            return []
        rate = f"{self.network_gb_s:.3g} GB/s"
        assumed = ", which is assumed" if self.network_is_assumed else ""
        return [f"each gradient is summed over {self.replicas} replicas, at {rate} a rank{assumed}"]

    def traced_waits_text(self) -> str:
        """ "h2d 93 %, compute 5 %": what the traced steps waited for."""
        if not self.traced_step_s:
            return ""
        none = (self.traced_none_s or 0.0) / self.traced_step_s
        shown = [*self.traced_waits.items(), (NONE, none)]
        return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= _EXPLAINED)

    def slowest_lines(self) -> list[str]:
        """Which ranks the others wait for, by rates and by a trace; [] where that makes little."""
        several = len(self.hosts) > 1
        found = [each.text(with_host=several) for each in self.slow_ranks if each.matters]
        if self.last_rank is not None and is_felt(self.last_rank):
            found.append(last_text(self.last_rank, with_host=several))
        return found

    def _title(self) -> str:
        count = sum(group.count for group in self.stages)
        each = "" if self.ranks == 1 else f"each of {self._ranks_text()} ranks' "
        return (
            f"{self.model}, {short_count(self.parameters)} parameters, on {each}{self.hardware}: "
            f"{count} stages of {self.templates} templates"
        )

    def _ranks_text(self) -> str:
        return str(self.ranks) if self.replicas == 1 else f"{self.replicas} x {self.ranks}"

    def _sections(self) -> list[Section]:
        measured = ""
        if self.traced_step_s is not None:
            measured = f", {duration(self.traced_step_s)} traced"
        step = f"a step: {duration(self.step_s)} predicted{measured}; bound by {self.bound}"
        when = f"the device's peak is at {self.device.when}"
        sections: list[Section] = [
            ("stages", self._stage_rows()),
            (f"memory: {when}", self.memory_rows()),
            ("the plan", list(self.reasons)),
            (step, self._stream_rows()),
            ("its time depends on", [*self._bounds_lines(), *self.network_lines()]),
        ]
        if self.traced_step_s is not None:
            sections.append(("critical path of the traced steps", [self.traced_waits_text()]))
        if slowest := self.slowest_lines():
            sections.append(("the slowest rank", slowest))
        if self.disk_traffic is not None:
            sections.append(("the disk", self.disk_traffic.lines()))
        if self.code:
            sections.append(("code, in this process", self._code_rows()))
        if self.budgets:
            sections.append((_TENTH, self._budget_rows()))
        return sections + (self._change_sections() if self.changes else [])

    def _bounds_lines(self) -> list[str]:
        more = sum(self.bounds.values()) > _ALL
        note = "each as if the others stayed as they are, so together they are more than 100%"
        return [self.bounds_text(), *([note] if more else [])]

    def _change_sections(self) -> list[Section]:
        notes = [f"{change.name}: {change.note}" for change in self.changes if change.note]
        return [("what would help, of what was tried", self._change_rows()), ("", notes)]

    def _stage_rows(self) -> list[list[str]]:
        several = len({group.graph for group in self.stages}) > 1
        head = ["stage", "module", "template", "parameters", "is", "F", "RECOMPUTE", "B"]
        rows = [["graph", *head] if several else head]
        for group in self.stages[:_ROWS]:
            which = str(group.first)
            if group.count > 1:
                which = f"{group.first}-{group.last}"
            if 1 < group.count <= group.last - group.first:
                which = f"{group.count} of {which}"
            times = (group.forward_s, group.recompute_s, group.backward_s)
            rows.append(
                [
                    *([str(group.graph)] if several else []),
                    which,
                    textwrap.shorten(group.names, 34, placeholder="..."),
                    str(group.template),
                    format_bytes(group.parameter_bytes) if group.parameter_bytes else "",
                    group.treatment,
                    *(duration(time_s) if time_s else "" for time_s in times),
                ]
            )
        if left := self.stages[_ROWS:]:
            count = sum(group.count for group in left)
            rows.append([*([""] if several else []), "...", f"and {count} more stages", *[""] * 6])
        return rows

    def _stream_rows(self) -> list[list[str]]:
        traced = self.traced_step_s
        head = ["stream", "busy", "of the step", "critical path"]
        rows = [head + (["traced busy", "of the step", "critical path"] if traced else [])]
        for row in self.streams:
            cells = [row.stream, duration(row.predicted_s)]
            cells += [percent(part, self.step_s) for part in (row.predicted_s, row.waited_s)]
            if traced:
                busy = row.traced_s or 0.0
                cells += [duration(busy), percent(busy, traced)]
                cells.append(percent(row.traced_waited_s or 0.0, traced))
            rows.append(cells)
        return rows

    def _code_rows(self) -> list[list[str]]:
        beside = any(counts.beside for counts in self.code.values())
        head = ["of", "from caches", *(["compiled beside it"] if beside else []), "compiled in it"]
        rows = [[*head, "took"]]
        for kind, counts in self.code.items():
            cells = [kind, str(counts.found - counts.beside if beside else counts.found)]
            cells += [str(counts.beside)] if beside else []
            rows.append([*cells, str(counts.made), duration(counts.time_s)])
        return rows

    def change_lines(self) -> list[str]:
        """What would help, for a terminal."""
        (title, rows), (_, notes) = self._change_sections()
        return [title, *as_lines(rows), *as_lines(notes)]

    def budget_lines(self) -> list[str]:
        """What a tenth more of each budget would buy, for a terminal; [] where nobody asked."""
        return [_TENTH, *as_lines(self._budget_rows()), ""] if self.budgets else []

    def _budget_rows(self) -> list[list[str]]:
        rows = [["resource", "throughput", "step time"]]
        for change in self.budgets:
            gain = "-" if change.gain is None else f"{change.gain:+.1%}"
            rows.append([change.name, gain, duration(change.step_s) if change.step_s else "-"])
        return rows

    def _change_rows(self) -> list[list[str]]:
        rows = [["change", "throughput", "step time", "device", "host"]]
        for change in self.changes:
            sizes = (change.device_bytes, change.host_bytes)
            rows.append(
                [
                    change.name,
                    "-" if change.gain is None else f"{change.gain:+.0%}",
                    "-" if change.step_s is None else duration(change.step_s),
                    *("" if size is None else format_bytes(size) for size in sizes),
                ]
            )
        return rows

    def __str__(self) -> str:
        return as_text(self._title(), self._sections())

    def __repr__(self) -> str:
        step = f"{duration(self.step_s)} a step, bound by {self.bound}"
        return f"<explanation of {self.model}: {step}; print() shows it>"

    def _repr_html_(self) -> str:
        return as_html(self._title(), self._sections())


def explanation(
    now: Scenario,
    *,
    model: str,
    parameters: int,
    traced: Traced | None = None,
    rebuilt: Mapping[str, Callable[[], Scenario]] | None = None,
    more: Mapping[str, Callable[[], Scenario]] | None = None,
    try_changes: bool = True,
    locked_bytes: int | None = None,
    numa_node: str | None = None,
    rates: Sequence[RankRates] = (),
    rank_steps: Sequence[RankSteps] = (),
    code: Mapping[str, CodeCounts] | None = None,
    moved: Moved | None = None,
) -> Explanation:
    """What there is to say of a planned step.

    Args:
        now: the step.
        model: its class.
        parameters: how many it has.
        traced: what ran in a trace, of whole steps; from the second one on, where there are two.
        rebuilt: other plans of the same model; see `megacompile.plan.scenario.changes`.
        more: the same plan with more of a memory; see `megacompile.plan.scenario.budgets`.
        try_changes: say what would help.
        locked_bytes: of host memory that is page-locked. Default: what can be, where that is known.
        numa_node: near the GPU, of several: "1 of 2".
        rates: of each of the ranks that share the model; the slowest are those of `now`.
        rank_steps: what each of them has traced.
        code: what was compiled, by kind.
        moved: from and to the disk so far.
    """
    timeline = now.timeline()
    peak = now.device.peak
    device = now.device_kinds()
    host, disk, planned = now.host(), now.disk(), now.disk_traffic()
    traffic = DiskTraffic(planned[Stream.READ], planned[Stream.WRITE], moved)
    page_locked = None
    if (limit := now.hardware.locked_bytes) is not None:
        page_locked = Memory({}, sum(host.values()), limit)
        locked_bytes = min(limit, sum(host.values())) if locked_bytes is None else locked_bytes
    steps = None if traced is None else traced_steps(traced, model)
    return Explanation(
        model=model,
        hardware=now.hardware.name,
        parameters=parameters,
        templates=len({id(t) for schedule in now.schedules for t in schedule.templates}),
        stages=stage_groups(now),
        device=Memory(
            device, peak.total_bytes, now.device_bytes, f"{peak.graph} {peak.label}".strip()
        ),
        host=Memory(host, sum(host.values()), now.host_bytes),
        disk=Memory(disk, sum(disk.values()), now.disk_bytes) if disk or now.disk_bytes else None,
        reasons=_reasons([schedule.plan.reasons for schedule in now.schedules]),
        step_s=now.step_s,
        traced_step_s=None if steps is None else steps.step_s,
        traced_none_s=None if steps is None else steps.waited_s.get(NONE, 0.0),
        streams=_streams(timeline, steps),
        bounds=now.bounds(),
        changes=changes(now, rebuilt) if try_changes else (),
        budgets=budgets(now, more) if try_changes or more else (),
        locked_bytes=locked_bytes,
        page_locked=page_locked,
        pageable_s=now.pageable_s if now.pageable_bytes else 0.0,
        numa_node=numa_node,
        ranks=now.ranks,
        replicas=now.replicas,
        network_gb_s=now.hardware.replicas_gb_s if now.replicas > 1 else None,
        network_is_assumed=now.replicas > 1 and now.hardware.network_gb_s is None,
        hosts=tuple(dict.fromkeys([r.host for r in rates] + [r.host for r in rank_steps])),
        slow_ranks=slow_ranks(now, rates),
        last_rank=last_rank(rank_steps),
        disk_traffic=traffic if disk else None,
        code={kind: copy(counts) for kind, counts in (code or {}).items() if not counts.is_none},
    )


def _streams(timeline: Prediction, steps: Steps | None) -> tuple[Busy, ...]:
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
