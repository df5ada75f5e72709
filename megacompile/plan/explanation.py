"""What a planned step does and why, on one screen: `megacompile.explain` and `plan`.

Sections of titles and rows; a terminal gets columns, a notebook tables, a program a dictionary.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from megacompile.cost.ops import node_s
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.plan.scenario import Change, Scenario, changes
from megacompile.text import columns, format_bytes, printable
from megacompile.tracing.critical_path import NONE, traced_steps
from megacompile.tracing.timeline import Timeline as Traced

_WIDTH = 100
_ROWS = 8  # groups of stages that are shown
_EXPLAINED = 0.02  # a resource that is responsible for less is left out

_Section = tuple[str, list[list[str]] | list[str]]  # a title, and columns or sentences


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
class Explanation:
    """See `megacompile.explain`. `str()` is for a terminal, `to_dict()` for programs."""

    model: str
    hardware: str
    parameters: int
    templates: int
    stages: tuple[StageGroup, ...]
    device: Memory
    host: Memory
    reasons: tuple[str, ...]
    step_s: float  # predicted
    traced_step_s: float | None
    traced_none_s: float | None  # of it, where no recorded op was what the step waited for
    streams: tuple[Busy, ...]
    bounds: dict[str, float]  # resource -> its share of the step's time, the largest first
    changes: tuple[Change, ...]

    @property
    def bound(self) -> str:
        """What bounds the step: compute, h2d, d2h, host memory bandwidth or host update."""
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
        for memory, name in ((self.device, "device"), (self.host, "host")):
            found[name]["fits"] = memory.fits
        bounds = {"bound": self.bound, "traced_bound": self.traced_bound}
        return {**found, **bounds, "traced_waits": self.traced_waits}

    def memory_rows(self) -> list[list[str]]:
        """Kind by kind, what the device needs and the host."""
        kinds = dict.fromkeys([*self.host.kinds, *self.device.kinds])
        rows = [["memory", "device", "host"]]
        for kind in kinds:
            sizes = (memory.kinds.get(kind) for memory in (self.device, self.host))
            rows.append([kind, *(format_bytes(size) if size else "" for size in sizes)])
        both = (self.device, self.host)
        rows.append(["needed", *(format_bytes(memory.needed_bytes) for memory in both)])
        there = [memory.there_bytes for memory in both]
        rows.append(["there", *("?" if n is None else format_bytes(n) for n in there)])
        return rows

    def bounds_text(self) -> str:
        """ "compute 71 %, host update 20 %": what the step's time depends on."""
        shown = [(name, s) for name, s in self.bounds.items() if s >= _EXPLAINED]
        return ", ".join(f"{name} {share:.0%}" for name, share in shown) or "nothing of these"

    def traced_waits_text(self) -> str:
        """ "h2d 93 %, compute 5 %": what the traced steps waited for."""
        shown = [*self.traced_waits.items(), (NONE, (self.traced_none_s or 0.0))]
        if self.traced_step_s:
            shown[-1] = NONE, shown[-1][1] / self.traced_step_s
        return ", ".join(f"{name} {share:.0%}" for name, share in shown if share >= _EXPLAINED)

    def _title(self) -> str:
        count = sum(group.last - group.first + 1 for group in self.stages)
        return (
            f"{self.model}, {_count(self.parameters)} parameters, on {self.hardware}: "
            f"{count} stages of {self.templates} templates"
        )

    def _sections(self) -> list[_Section]:
        measured = ""
        if self.traced_step_s is not None:
            measured = f", {duration(self.traced_step_s)} traced"
        step = f"a step: {duration(self.step_s)} predicted{measured}; bound by {self.bound}"
        when = f"the device's peak is at {self.device.when}"
        sections: list[_Section] = [
            ("stages", self._stage_rows()),
            (f"memory: {when}", self.memory_rows()),
            ("the plan", list(self.reasons)),
            (step, self._stream_rows()),
            ("its time depends on", [self.bounds_text()]),
        ]
        if self.traced_step_s is not None:
            sections.append(("the traced steps waited for", [self.traced_waits_text()]))
        return sections + (self._change_sections() if self.changes else [])

    def _change_sections(self) -> list[_Section]:
        notes = [f"{change.name}: {change.note}" for change in self.changes if change.note]
        return [("what would help, of what was tried", self._change_rows()), ("", notes)]

    def _stage_rows(self) -> list[list[str]]:
        rows = [["stage", "module", "template", "parameters", "is", "F", "RECOMPUTE", "B"]]
        for group in self.stages[:_ROWS]:
            one = group.first == group.last
            times = (group.forward_s, group.recompute_s, group.backward_s)
            rows.append(
                [
                    str(group.first) if one else f"{group.first}-{group.last}",
                    textwrap.shorten(group.names, 34, placeholder="..."),
                    str(group.template),
                    format_bytes(group.parameter_bytes) if group.parameter_bytes else "",
                    group.treatment,
                    *(duration(time_s) if time_s else "" for time_s in times),
                ]
            )
        if left := self.stages[_ROWS:]:
            count = sum(group.last - group.first + 1 for group in left)
            rows.append(["...", f"and {count} more stages", *[""] * 6])
        return rows

    def _stream_rows(self) -> list[list[str]]:
        traced = self.traced_step_s
        head = ["stream", "busy", "of the step", "waited for"]
        rows = [head + (["traced busy", "of the step", "waited for"] if traced else [])]
        for row in self.streams:
            cells = [row.stream, duration(row.predicted_s)]
            cells += [_share(part, self.step_s) for part in (row.predicted_s, row.waited_s)]
            if traced:
                busy = row.traced_s or 0.0
                cells += [duration(busy), _share(busy, traced)]
                cells.append(_share(row.traced_waited_s or 0.0, traced))
            rows.append(cells)
        return rows

    def change_lines(self) -> list[str]:
        """What would help, for a terminal."""
        (title, rows), (_, notes) = self._change_sections()
        return [title, *_lines(rows), *_lines(notes)]

    def _change_rows(self) -> list[list[str]]:
        rows = [["change", "work a second", "a step", "device", "host"]]
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
        lines = [self._title()]
        for title, rows in self._sections():
            lines += ["", title] if title else []
            lines += _lines(rows)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [f"<h4>{html.escape(self._title())}</h4>"]
        for title, rows in self._sections():
            parts.append(f"<h5>{html.escape(title)}</h5>")
            cells = [row if isinstance(row, list) else [row] for row in rows]
            body = "".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in cells
            )
            parts.append(f"<table>{body}</table>")
        return "\n".join(parts)


def explanation(
    now: Scenario,
    *,
    model: str,
    parameters: int,
    traced: Traced | None = None,
    rebuilt: Mapping[str, Callable[[], Scenario]] | None = None,
    try_changes: bool = True,
) -> Explanation:
    """What there is to say of a planned step.

    Args:
        now: the step.
        model: its class.
        parameters: how many it has.
        traced: what ran in a trace, of whole steps; from the second one on, where there are two.
        rebuilt: other plans of the same model; see `megacompile.plan.scenario.changes`.
        try_changes: say what would help.
    """
    timeline = now.timeline()
    peak = now.device.peak
    device = now.device_kinds()
    host = now.host()
    steps = None if traced is None else traced_steps(traced, model)
    streams = [
        Busy(
            stream.value,
            timeline.busy_s(stream),
            timeline.critical_s.get(stream, 0.0),
            None if steps is None else steps.busy_s.get(stream.value, 0.0),
            None if steps is None else steps.waited_s.get(stream.value, 0.0),
        )
        for stream in Stream
    ]
    idle = Stream.DEVICE.value  # left out where nobody helps the host
    streams = [busy for busy in streams if busy.works or busy.stream != idle]
    reasons = [reason for schedule in now.schedules for reason in schedule.plan.reasons]
    return Explanation(
        model=model,
        hardware=now.hardware.name,
        parameters=parameters,
        templates=len({id(t) for schedule in now.schedules for t in schedule.templates}),
        stages=_groups(now),
        device=Memory(
            device, peak.total_bytes, now.device_bytes, f"{peak.graph} {peak.label}".strip()
        ),
        host=Memory(host, sum(host.values()), now.host_bytes),
        reasons=tuple(dict.fromkeys(reasons)),
        step_s=now.step_s,
        traced_step_s=None if steps is None else steps.step_s,
        traced_none_s=None if steps is None else steps.waited_s.get(NONE, 0.0),
        streams=tuple(s for s in streams if s.predicted_s or s.traced_s or s.stream != "host"),
        bounds=now.bounds(),
        changes=changes(now, rebuilt) if try_changes else (),
    )


def _groups(now: Scenario) -> tuple[StageGroup, ...]:
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
        words.append("handed over")
    return ", ".join(words)


def in_lines(texts: Sequence[str]) -> list[str]:
    """A dash for each, wrapped."""
    return _lines(texts)


def _lines(rows: Sequence[list[str]] | Sequence[str]) -> list[str]:
    """Columns, or texts with a dash each."""
    if rows and isinstance(rows[0], list):
        cells = [list(row) for row in rows]
        last = len(cells[0]) - 1
        words = (0, *(i for i in range(1, last + 1) if _is_words([row[i] for row in cells[1:]])))
        return ["  " + line for line in columns(cells, left=words).splitlines()]
    found = []
    for row in rows:
        found += textwrap.wrap(str(row), _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return found


def _is_words(cells: Sequence[str]) -> bool:
    return any(cell and not (cell[0].isdigit() or cell[0] in "+-?") for cell in cells)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _count(number: float) -> str:
    for unit in ("", " K", " M", " B"):
        if number < 999.5 or unit == " B":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def duration(seconds: float) -> str:
    """ "8.41 us", "1.26 s": three significant digits."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
