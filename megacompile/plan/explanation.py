"""Renders the findings about a planned step: each section is a function from the findings to its
rows."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence

from megacompile.plan.findings import Findings
from megacompile.plan.scenario import Scenario
from megacompile.text import WIDTH, as_lines, duration, format_bytes, percent, short_count
from megacompile.views.critical_path import NONE

_ALL = 1.05  # of a step's time; a little more is rounding
_ROWS = 8  # groups of stages that are shown
_EXPLAINED = 0.02  # smaller shares are not shown
_GAIN = 0.01  # of throughput; changes with a smaller one are not listed
_FELT = 0.03  # of a step; the slowest rank is not shown if the others wait less for it

Section = tuple[str, list[list[str]] | list[str]]  # a heading, and columns or sentences


class Explanation(Findings):
    """See `megacompile.explain`. `str()` is for a terminal, `to_dict()` for programs."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join([_title(self), *section_lines(_sections(self))])

    def __repr__(self) -> str:
        step = f"{duration(self.step_s)} a step, bound by {self.bound}"
        return f"<explanation of {self.model}: {step}; print() shows it>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def summary(now: Scenario, model: str, parameters: int, tokens: int) -> str:
    """A planned step in one line. `tokens`: of a step; 0: unknown."""
    waits = now.timeline().critical_s
    lane = max(waits, key=waits.__getitem__)
    rate = f", {tokens / now.step_s:,.0f} tokens/s" if tokens else ""
    tiers = {"device": now.device.peak.total_bytes, "host": sum(now.host().values())}
    tiers["disk"] = sum(now.disk().values())
    memory = ", ".join(f"{format_bytes(n)} on the {tier}" for tier, n in tiers.items() if n)
    return (
        f"{model}, {short_count(parameters)} parameters: {duration(now.step_s)} a step predicted"
        f"{rate}, {percent(waits[lane], now.step_s)} of it waits for {lane.value}; {memory}; "
        "megacompile.explain(model) has more"
    )


def section_lines(sections: Sequence[Section]) -> list[str]:
    """Sections as lines for a terminal. A section without a heading continues the one before."""
    lines: list[str] = []
    for heading, rows in sections:
        lines += ["", heading] if heading else []
        lines += as_lines(rows)
    return lines


def _title(found: Findings) -> str:
    count = sum(group.count for group in found.stages)
    ranks = f"{found.ranks}" if found.replicas == 1 else f"{found.replicas} x {found.ranks}"
    each = "" if found.ranks == 1 else f"each of {ranks} ranks' "
    return textwrap.fill(
        f"{found.model}, {short_count(found.parameters)} parameters, "
        f"on {each}{found.hardware}: {count} stages of {found.templates} templates",
        WIDTH,
    )


def _sections(found: Findings) -> list[Section]:
    """All sections, in the order of the page."""
    measured, traced = "", found.traced_step_s
    if traced is not None:
        measured = f", {duration(traced)} traced"
    step = f"a step: {duration(found.step_s)} predicted{measured}; bound by {found.bound}"
    depends = [shares_text(found.bounds), *network_lines(found)]
    if sum(found.bounds.values()) > _ALL:
        note = "each share assumes that the others stay the same, so they add up to more than 100%"
        depends.insert(1, note)
    waits = [shares_text(found.traced_waits)] if traced else []
    page: list[Section] = [
        ("stages", _stage_rows(found)),
        (f"memory: the device's peak is at {found.device.when}", memory_rows(found)),
        ("the plan", list(found.reasons)),
        (step, _stream_rows(found)),
        ("its time depends on", depends),
        ("critical path of the traced steps", waits),
        ("the slowest rank", _slowest_lines(found)),
        ("the disk", _disk_lines(found)),
        ("code", _code_rows(found)),
        *change_sections(found),
    ]
    return [(heading, rows) for heading, rows in page if rows]


def _stage_rows(found: Findings) -> list[list[str]]:
    rows = [["stage", "module", "template", "parameters", "is", "F", "RECOMPUTE", "B"]]
    several = len({group.graph for group in found.stages}) > 1
    for group in found.stages[:_ROWS]:
        which = str(group.first) if group.count == 1 else f"{group.first}-{group.last}"
        if 1 < group.count <= group.last - group.first:
            which = f"{group.count} of {which}"
        times = (group.forward_s, group.recompute_s, group.backward_s)
        rows.append(
            [
                f"graph {group.graph}: {which}" if several else which,
                textwrap.shorten(group.names, 34, placeholder="..."),
                str(group.template),
                format_bytes(group.parameter_bytes) if group.parameter_bytes else "",
                group.treatment,
                *(duration(time_s) if time_s else "" for time_s in times),
            ]
        )
    if left := found.stages[_ROWS:]:
        rows.append(["...", f"and {sum(g.count for g in left)} more stages", *[""] * 6])
    return rows


def memory_rows(found: Findings) -> list[list[str]]:
    """Memory by kind, the largest first, with a column for the device, the host, the disk if there
    is one, and page-locked memory if its limit is known."""
    every = {"device": found.device, "host": found.host, "disk": found.disk}
    every["page-locked"] = found.page_locked
    tiers = {name: memory for name, memory in every.items() if memory is not None}
    rows = [["memory", *tiers]]
    each = [memory.kinds for memory in tiers.values()]
    sizes = {kind: [m.get(kind, 0) for m in each] for kinds in each for kind in kinds}
    for kind, row in sorted(sizes.items(), key=lambda item: item[1], reverse=True):
        if any(row):
            rows.append([kind, *(format_bytes(size) if size else "" for size in row)])
    rows.append(["needed", *(format_bytes(m.needed_bytes) for m in tiers.values())])
    available = [memory.available_bytes for memory in tiers.values()]
    rows.append(["available", *("?" if n is None else format_bytes(n) for n in available)])
    if found.pageable_s:
        cost = ["pageable memory costs a step", *[""] * (len(tiers) - 1)]
        rows.append([*cost, duration(found.pageable_s)])
    return rows


def _stream_rows(found: Findings) -> list[list[str]]:
    traced = found.traced_step_s
    head = ["stream", "busy", "of the step", "critical path"]
    rows = [head + (["traced busy", "of the step", "critical path"] if traced else [])]
    for row in found.streams:
        cells = [row.stream, duration(row.predicted_s)]
        cells += [percent(part, found.step_s) for part in (row.predicted_s, row.waited_s)]
        if traced:
            busy = row.traced_s or 0.0
            cells += [duration(busy), percent(busy, traced)]
            cells.append(percent(row.traced_waited_s or 0.0, traced))
        rows.append(cells)
    return rows


def shares_text(shares: Mapping[str, float]) -> str:
    """ "compute 71%, host update 20%": the parts of a step's time that are worth showing."""
    shown = (f"{name} {share:.0%}" for name, share in shares.items() if share >= _EXPLAINED)
    return ", ".join(shown) or "none of these"


def network_lines(found: Findings) -> list[str]:
    """The rate at which replicas sum gradients; [] without replicas."""
    if found.network_gb_s is None:
        return []
    rate = f"{found.network_gb_s:.3g} GB/s"
    assumed = " (assumed)" if found.network_is_assumed else ""
    return [f"each gradient is summed over {found.replicas} replicas, at {rate} a rank{assumed}"]


def _slowest_lines(found: Findings) -> list[str]:
    """The rank that the others wait for in a trace; [] if they wait little."""
    last = found.last_rank
    if last is None or last.waited_s <= _FELT * last.step_s:
        return []
    why = "none of its recorded ops takes longer than the others': its host has other work"
    if last.lane != NONE:
        busy, others = duration(last.busy_s), duration(last.others_busy_s)
        why = f"its {last.lane} is busy for {busy} a step, the others' for {others}"
    return [
        f"{last.rank} (host {last.host}) came last in the traced steps: {why}; the others wait "
        f"{duration(last.waited_s)} a step longer in collectives"
    ]


def _disk_lines(found: Findings) -> list[str]:
    if (traffic := found.disk_traffic) is None:
        return []
    reads, writes = format_bytes(traffic.read_bytes), format_bytes(traffic.written_bytes)
    return [f"each step reads {reads} and writes {writes}"]


def _code_rows(found: Findings) -> list[list[str]]:
    rows = [["of", "from caches", "compiled here", "took"]]
    for kind, counts in found.code.items():
        rows.append([kind, str(counts.found), str(counts.made), duration(counts.time_s)])
    return rows if found.code else []


def change_sections(found: Findings) -> list[Section]:
    """The changes that help, with their gains: a faster step or, if this one does not fit, one that
    does. Then the names of the others that were tried; [] if none was."""
    fits = False not in (found.device.fits, found.host.fits)
    rows = [["change", "throughput", "step time", "device", "host"]]
    others = []
    for change in found.changes:
        if change.gain is None or (fits and change.gain < _GAIN):
            others.append(change.name)
            continue
        sizes = (change.device_bytes or 0, change.host_bytes or 0)
        figures = (duration(change.step_s or 0.0), *map(format_bytes, sizes))
        rows.append([change.name, f"{change.gain:+.0%}", *figures])
    page: list[Section] = [("what would help", rows)] if rows[1:] else []
    if others:
        page.append(("" if page else "what would help", [f"no help: {'; '.join(others)}"]))
    return page
