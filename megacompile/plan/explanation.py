"""Renders the findings about a planned step: each section is a function from the findings to its
rows."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

from megacompile.cost.memory import MemoryKind
from megacompile.cost.rank_rates import FELT
from megacompile.plan.findings import DiskTraffic, Findings
from megacompile.text import as_lines, duration, format_bytes, percent, short_count
from megacompile.views.critical_path import NONE

_ALL = 1.05  # of a step's time; a little more is rounding
_ROWS = 8  # groups of stages that are shown
_KINDS = (  # rows of the table of memory
    *(MemoryKind.PARAMETERS, MemoryKind.MASTERS, MemoryKind.GRADIENTS, MemoryKind.STATES),
    *(MemoryKind.ACTIVATIONS, MemoryKind.SAVED, MemoryKind.INPUTS, MemoryKind.WORKSPACE),
    *(MemoryKind.SLOTS, MemoryKind.STAGED),
)
_EXPLAINED = 0.02  # smaller shares are not shown

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
        parts = [f"<h4>{html.escape(_title(self))}</h4>"]
        for heading, rows in _sections(self):
            parts.append(f"<h5>{html.escape(heading)}</h5>")
            cells = [row if isinstance(row, list) else [row] for row in rows]
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in cells
            )
            parts.append(f"<table>{body}</table>")
        return "\n".join(parts)


def section_lines(sections: Sequence[Section]) -> list[str]:
    """Sections as lines for a terminal. A section without a heading continues the one before."""
    lines: list[str] = []
    for heading, rows in sections:
        lines += ["", heading] if heading else []
        lines += as_lines(rows)
    return lines


def _title(found: Findings) -> str:
    """The title of the page."""
    count = sum(group.count for group in found.stages)
    ranks = f"{found.ranks}" if found.replicas == 1 else f"{found.replicas} x {found.ranks}"
    each = "" if found.ranks == 1 else f"each of {ranks} ranks' "
    return (
        f"{found.model}, {short_count(found.parameters)} parameters, "
        f"on {each}{found.hardware}: {count} stages of {found.templates} templates"
    )


def _sections(found: Findings) -> list[Section]:
    """All sections, in the order of the page."""
    measured = ""
    if found.traced_step_s is not None:
        measured = f", {duration(found.traced_step_s)} traced"
    note = ["each share assumes that the others stay the same, so they add up to more than 100%"]
    note = note if sum(found.bounds.values()) > _ALL else []
    step = f"a step: {duration(found.step_s)} predicted{measured}; bound by {found.bound}"
    page: list[Section] = [
        ("stages", _stage_rows(found)),
        (f"memory: the device's peak is at {found.device.when}", memory_rows(found)),
        ("the plan", list(found.reasons)),
        (step, _stream_rows(found)),
        ("its time depends on", [bounds_text(found), *note, *network_lines(found)]),
    ]
    if found.traced_step_s is not None:
        page.append(("critical path of the traced steps", [traced_waits_text(found)]))
    if slowest := _slowest_lines(found):
        page.append(("the slowest rank", slowest))
    if found.disk_traffic is not None:
        page.append(("the disk", _disk_lines(found.disk_traffic)))
    if found.code:
        page.append(("code", _code_rows(found)))
    return [*page, *budget_sections(found), *change_sections(found)]


def _stage_rows(found: Findings) -> list[list[str]]:
    several = len({group.graph for group in found.stages}) > 1
    head = ["stage", "module", "template", "parameters", "is", "F", "RECOMPUTE", "B"]
    rows = [["graph", *head] if several else head]
    for group in found.stages[:_ROWS]:
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
    if left := found.stages[_ROWS:]:
        count = sum(group.count for group in left)
        rows.append([*([""] if several else []), "...", f"and {count} more stages", *[""] * 6])
    return rows


def memory_rows(found: Findings) -> list[list[str]]:
    """Memory by kind, in bytes, with a column for the device, the host, the disk if there is one,
    and page-locked memory if its limit is known."""
    tiers = {"device": found.device, "host": found.host}
    if found.disk is not None:
        tiers["disk"] = found.disk
    if found.page_locked is not None:
        tiers["page-locked"] = found.page_locked

    def one(part: str, tier: str, text: str) -> list[str]:
        return [part, *(text if name == tier else "" for name in tiers)]

    rows = [["memory", *tiers]]
    for kind in _KINDS:
        sizes = [memory.kinds.get(kind.value, 0) for memory in tiers.values()]
        if any(sizes):
            rows.append([kind.value, *(format_bytes(size) if size else "" for size in sizes)])
    rows.append(["needed", *(format_bytes(m.needed_bytes) for m in tiers.values())])
    available = [memory.available_bytes for memory in tiers.values()]
    rows.append(["available", *("?" if n is None else format_bytes(n) for n in available)])
    if found.page_locked is not None and found.page_locked.fits is False:
        short = found.page_locked.needed_bytes - (found.page_locked.available_bytes or 0)
        rows.append(one("stay pageable", "page-locked", format_bytes(short)))
        rows.append(one("which costs a step", "page-locked", duration(found.pageable_s)))
    elif found.page_locked is None and found.locked_bytes is not None:
        rows.append(one("page-locked", "host", format_bytes(found.locked_bytes)))
    if found.numa_node is not None:
        rows.append(one("NUMA node", "host", found.numa_node))
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


def bounds_text(found: Findings) -> str:
    """ "compute 71 %, host update 20 %": the resources that bound the step."""
    shown = [(name, s) for name, s in found.bounds.items() if s >= _EXPLAINED]
    return ", ".join(f"{name} {share:.0%}" for name, share in shown) or "none of these"


def network_lines(found: Findings) -> list[str]:
    """The rate at which replicas sum gradients; [] without replicas."""
    if found.network_gb_s is None:
        return []
    rate = f"{found.network_gb_s:.3g} GB/s"
    assumed = " (assumed)" if found.network_is_assumed else ""
    return [f"each gradient is summed over {found.replicas} replicas, at {rate} a rank{assumed}"]


def traced_waits_text(found: Findings) -> str:
    """ "h2d 93 %, compute 5 %": the streams that the traced steps waited for."""
    if not found.traced_step_s:
        return ""
    none = (found.traced_none_s or 0.0) / found.traced_step_s
    shown = [*found.traced_waits.items(), (NONE, none)]
    return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= _EXPLAINED)


def _slowest_lines(found: Findings) -> list[str]:
    """The ranks that the others wait for, by their rates and in a trace; [] if the effect is
    small."""

    def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
        where = f" (host {', '.join(hosts)})" if len(found.hosts) > 1 else ""
        return ", ".join(map(str, ranks)) + where

    lines = []
    for rate in found.slow_ranks:
        lines.append(
            f"{named(rate.ranks, rate.hosts)}: {rate.name} at {rate.value:.3g} {rate.unit}, the "
            f"others at {rate.median:.3g}; at their rate a step would be {rate.shorter:.0%} shorter"
        )
    last = found.last_rank
    if last is not None and last.waited_s > FELT * last.step_s:
        why = "none of its recorded ops takes longer than the others': its host has other work"
        if last.lane != NONE:
            why = (
                f"its {last.lane} is busy for {duration(last.busy_s)} a step, the others' for "
                f"{duration(last.others_busy_s)}"
            )
        lines.append(
            f"{named([last.rank], [last.host])} came last in the traced steps: {why}; the others "
            f"wait {duration(last.waited_s)} a step longer in collectives"
        )
    return lines


def _disk_lines(traffic: DiskTraffic) -> list[str]:
    reads, writes = format_bytes(traffic.read_bytes), format_bytes(traffic.written_bytes)
    lines = [f"planned: each step reads {reads} and writes {writes}"]
    if (moved := traffic.so_far) is not None:
        reads, writes = format_bytes(moved.read_bytes), format_bytes(moved.written_bytes)
        lines.append(f"{moved.steps} steps so far: {reads} read and {writes} written")
    return lines


def _code_rows(found: Findings) -> list[list[str]]:
    rows = [["of", "from caches", "compiled here", "took"]]
    for kind, counts in found.code.items():
        rows.append([kind, str(counts.found), str(counts.made), duration(counts.time_s)])
    return rows


def budget_sections(found: Findings) -> list[Section]:
    """The gain from a tenth more of each resource; [] if not requested."""
    rows = [["resource", "throughput", "step time"]]
    for change in found.budgets:
        gain = "-" if change.gain is None else f"{change.gain:+.1%}"
        rows.append([change.name, gain, duration(change.step_s) if change.step_s else "-"])
    return [("with a tenth more of one resource", rows)] if found.budgets else []


def change_sections(found: Findings) -> list[Section]:
    """The changes that were tried, with their gains; [] if none was."""
    rows = [["change", "throughput", "step time", "device", "host"]]
    for change in found.changes:
        sizes = (change.device_bytes, change.host_bytes)
        rows.append(
            [
                change.name,
                "-" if change.gain is None else f"{change.gain:+.0%}",
                "-" if change.step_s is None else duration(change.step_s),
                *("" if size is None else format_bytes(size) for size in sizes),
            ]
        )
    notes = [f"{change.name}: {change.note}" for change in found.changes if change.note]
    page: list[Section] = [("what would help", rows), ("", notes)]
    return page if found.changes else []
