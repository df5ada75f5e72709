"""Explains a planned step on one screen, what it does and why: `megacompile.explain` and `plan`.

A terminal and a notebook get the sections of `megacompile.plan.sections`, a program a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy

from megacompile.code_counts import CodeCounts
from megacompile.cost.pageable import SHORT
from megacompile.cost.ranks import RankRates
from megacompile.cost.simulate import Prediction
from megacompile.ir.stream import Stream
from megacompile.plan.findings import Busy, DiskTraffic, Findings, Memory, Moved
from megacompile.plan.report import as_html, as_text, duration
from megacompile.plan.scenario import Scenario, budgets, changes
from megacompile.plan.sections import sections, title
from megacompile.plan.slow_ranks import slow_ranks
from megacompile.plan.stage_groups import stage_groups
from megacompile.tracing.critical_path import NONE, RankSteps, StepFigures, last_rank, traced_steps
from megacompile.tracing.timeline import Timeline as Traced


class Explanation(Findings):
    """See `megacompile.explain`. `str()` is for a terminal, `to_dict()` for programs."""

    __slots__ = ()

    def __str__(self) -> str:
        return as_text(title(self), sections(self))

    def __repr__(self) -> str:
        step = f"{duration(self.step_s)} a step, bound by {self.bound}"
        return f"<explanation of {self.model}: {step}; print() shows it>"

    def _repr_html_(self) -> str:
        return as_html(title(self), sections(self))


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
    """The explanation of a planned step.

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
