"""The page of an explanation: its sections, row by row.

`megacompile plan` prints some of them on a page of its own.
"""

from __future__ import annotations

import textwrap

from megacompile.cost.memory import MemoryKind
from megacompile.plan.findings import DiskTraffic, Findings
from megacompile.plan.report import Section, as_lines, duration, percent, short_count
from megacompile.plan.slow_ranks import is_felt, last_text
from megacompile.text import format_bytes
from megacompile.tracing.critical_path import NONE

_ALL = 1.05  # of a step's time; a little more is rounding
_ROWS = 8  # groups of stages that are shown
_PARTS: dict[str, tuple[MemoryKind, ...]] = {  # rows of the table of memory
    "parameters": (MemoryKind.PARAMETERS,),
    "masters": (MemoryKind.MASTERS,),
    "gradients": (MemoryKind.GRADIENTS,),
    "optimizer states": (MemoryKind.STATES,),
    "saved tensors": (MemoryKind.ACTIVATIONS, MemoryKind.SAVED),
    "buffers": (MemoryKind.SLOTS, MemoryKind.INPUTS, MemoryKind.WORKSPACE, MemoryKind.STAGED),
}
_TENTH = "with a tenth more of one resource"
_EXPLAINED = 0.02  # a resource that is responsible for less is left out


def memory_rows(explained: Findings) -> list[list[str]]:
    """The place of every part: bytes of the device, of the host and, with one, of the disk. Where
    page-locked memory is known to be limited, it is one more of them."""
    tiers = {"device": explained.device, "host": explained.host}
    if explained.disk is not None:
        tiers["disk"] = explained.disk
    if explained.page_locked is not None:
        tiers["page-locked"] = explained.page_locked

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
    if explained.page_locked is not None and explained.page_locked.fits is False:
        short = explained.page_locked.needed_bytes - (explained.page_locked.there_bytes or 0)
        rows.append(one("stay pageable", "page-locked", format_bytes(short)))
        rows.append(one("which costs a step", "page-locked", duration(explained.pageable_s)))
    elif explained.page_locked is None and explained.locked_bytes is not None:
        rows.append(one("page-locked", "host", format_bytes(explained.locked_bytes)))
    if explained.numa_node is not None:
        rows.append(one("NUMA node", "host", explained.numa_node))
    return rows


def bounds_text(explained: Findings) -> str:
    """ "compute 71 %, host update 20 %": what the step's time depends on."""
    shown = [(name, s) for name, s in explained.bounds.items() if s >= _EXPLAINED]
    return ", ".join(f"{name} {share:.0%}" for name, share in shown) or "nothing of these"


def network_lines(explained: Findings) -> list[str]:
    """At which rate ranks with the same rows sum gradients; [] without these."""
    if explained.network_gb_s is None:
        return []
    rate = f"{explained.network_gb_s:.3g} GB/s"
    assumed = ", which is assumed" if explained.network_is_assumed else ""
    return [
        f"each gradient is summed over {explained.replicas} replicas, at {rate} a rank{assumed}"
    ]


def traced_waits_text(explained: Findings) -> str:
    """ "h2d 93 %, compute 5 %": what the traced steps waited for."""
    if not explained.traced_step_s:
        return ""
    none = (explained.traced_none_s or 0.0) / explained.traced_step_s
    shown = [*explained.traced_waits.items(), (NONE, none)]
    return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= _EXPLAINED)


def slowest_lines(explained: Findings) -> list[str]:
    """The ranks that the others wait for, by rates and by a trace; [] where that makes little."""
    several = len(explained.hosts) > 1
    found = [each.text(with_host=several) for each in explained.slow_ranks if each.matters]
    if explained.last_rank is not None and is_felt(explained.last_rank):
        found.append(last_text(explained.last_rank, with_host=several))
    return found


def title(explained: Findings) -> str:
    """The title: what is explained, on one line."""
    count = sum(group.count for group in explained.stages)
    each = "" if explained.ranks == 1 else f"each of {_ranks_text(explained)} ranks' "
    return (
        f"{explained.model}, {short_count(explained.parameters)} parameters, "
        f"on {each}{explained.hardware}: {count} stages of {explained.templates} templates"
    )


def _ranks_text(explained: Findings) -> str:
    return (
        str(explained.ranks)
        if explained.replicas == 1
        else f"{explained.replicas} x {explained.ranks}"
    )


def sections(explained: Findings) -> list[Section]:
    """Everything, in the order of the page."""
    measured = ""
    if explained.traced_step_s is not None:
        measured = f", {duration(explained.traced_step_s)} traced"
    step = f"a step: {duration(explained.step_s)} predicted{measured}; bound by {explained.bound}"
    when = f"the device's peak is at {explained.device.when}"
    found: list[Section] = [
        ("stages", _stage_rows(explained)),
        (f"memory: {when}", memory_rows(explained)),
        ("the plan", list(explained.reasons)),
        (step, _stream_rows(explained)),
        ("its time depends on", [*_bounds_lines(explained), *network_lines(explained)]),
    ]
    if explained.traced_step_s is not None:
        found.append(("critical path of the traced steps", [traced_waits_text(explained)]))
    if slowest := slowest_lines(explained):
        found.append(("the slowest rank", slowest))
    if explained.disk_traffic is not None:
        found.append(("the disk", _disk_lines(explained.disk_traffic)))
    if explained.code:
        found.append(("code, in this process", _code_rows(explained)))
    if explained.budgets:
        found.append((_TENTH, _budget_rows(explained)))
    return found + (_change_sections(explained) if explained.changes else [])


def _disk_lines(traffic: DiskTraffic) -> list[str]:
    reads, writes = format_bytes(traffic.read_bytes), format_bytes(traffic.written_bytes)
    found = [f"by the plan each step reads {reads} and writes {writes}"]
    if (moved := traffic.so_far) is not None:
        reads, writes = format_bytes(moved.read_bytes), format_bytes(moved.written_bytes)
        found.append(f"{moved.steps} steps so far: {reads} read and {writes} written")
    return found


def _bounds_lines(explained: Findings) -> list[str]:
    more = sum(explained.bounds.values()) > _ALL
    note = "each as if the others stayed as they are, so together they are more than 100%"
    return [bounds_text(explained), *([note] if more else [])]


def _change_sections(explained: Findings) -> list[Section]:
    notes = [f"{change.name}: {change.note}" for change in explained.changes if change.note]
    return [("what would help, of what was tried", _change_rows(explained)), ("", notes)]


def _stage_rows(explained: Findings) -> list[list[str]]:
    several = len({group.graph for group in explained.stages}) > 1
    head = ["stage", "module", "template", "parameters", "is", "F", "RECOMPUTE", "B"]
    rows = [["graph", *head] if several else head]
    for group in explained.stages[:_ROWS]:
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
    if left := explained.stages[_ROWS:]:
        count = sum(group.count for group in left)
        rows.append([*([""] if several else []), "...", f"and {count} more stages", *[""] * 6])
    return rows


def _stream_rows(explained: Findings) -> list[list[str]]:
    traced = explained.traced_step_s
    head = ["stream", "busy", "of the step", "critical path"]
    rows = [head + (["traced busy", "of the step", "critical path"] if traced else [])]
    for row in explained.streams:
        cells = [row.stream, duration(row.predicted_s)]
        cells += [percent(part, explained.step_s) for part in (row.predicted_s, row.waited_s)]
        if traced:
            busy = row.traced_s or 0.0
            cells += [duration(busy), percent(busy, traced)]
            cells.append(percent(row.traced_waited_s or 0.0, traced))
        rows.append(cells)
    return rows


def _code_rows(explained: Findings) -> list[list[str]]:
    beside = any(counts.beside for counts in explained.code.values())
    head = ["of", "from caches", *(["compiled beside it"] if beside else []), "compiled in it"]
    rows = [[*head, "took"]]
    for kind, counts in explained.code.items():
        cells = [kind, str(counts.found - counts.beside if beside else counts.found)]
        cells += [str(counts.beside)] if beside else []
        rows.append([*cells, str(counts.made), duration(counts.time_s)])
    return rows


def change_lines(explained: Findings) -> list[str]:
    """The changes that would help, for a terminal."""
    (heading, rows), (_, notes) = _change_sections(explained)
    return [heading, *as_lines(rows), *as_lines(notes)]


def budget_lines(explained: Findings) -> list[str]:
    """The gain of a tenth more of each budget, for a terminal; [] where it was not asked for."""
    return [_TENTH, *as_lines(_budget_rows(explained)), ""] if explained.budgets else []


def _budget_rows(explained: Findings) -> list[list[str]]:
    rows = [["resource", "throughput", "step time"]]
    for change in explained.budgets:
        gain = "-" if change.gain is None else f"{change.gain:+.1%}"
        rows.append([change.name, gain, duration(change.step_s) if change.step_s else "-"])
    return rows


def _change_rows(explained: Findings) -> list[list[str]]:
    rows = [["change", "throughput", "step time", "device", "host"]]
    for change in explained.changes:
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
