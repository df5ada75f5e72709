"""The header above a schedule's Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.text import format_bytes


def header(schedule: Schedule) -> Iterator[str]:
    """The comment above the functions: stages, slots, passes, and why the plan is as it is."""
    slots = sum(slot.size_bytes for slot in schedule.slots)
    buckets = sum(bucket.size_bytes for bucket in schedule.buckets)
    yield (
        f"# schedule {schedule.name!r}: {len(schedule.stages)} stages, "
        f"{len(schedule.buckets)} buckets of {format_bytes(buckets)}, "
        f"{len(schedule.slots)} slots of {format_bytes(slots)}"
    )
    made = ", ".join(f"{record.name} {record.time_s:.3f} s" for record in schedule.history)
    yield f"# passes: {made or 'none'}"
    for _, run in itertools.groupby(schedule.stages, key=_kind):
        yield f"# {_stages_line(list(run))}"
    for slot in schedule.slots:
        left = [bucket for index, bucket in schedule.reused if index == slot.index]
        there = "".join(f", the forward leaves {bucket!r} in it" for bucket in left)
        yield f"# {slot!r}: {format_bytes(slot.size_bytes)}{there}"
    for reason in schedule.plan.reasons:
        yield f"# plan: {reason}"


def _kind(stage: Stage) -> object:
    """Neighbours of one template and equal bucket sizes share a line of the header."""
    alone = stage.index if stage.template is None else None
    return alone, id(stage.template), tuple(b.size_bytes for b in stage.buckets)


def _stages_line(run: list[Stage]) -> str:
    first, last = run[0], run[-1]
    many = len(run) > 1
    which = f"stage_{first.index}" + (f" to stage_{last.index}" if many else "")
    where = f"{first.name!r}" + (f" to {last.name!r}" if many else "")
    read = " + ".join(format_bytes(b.size_bytes) for b in first.buckets) or "nothing"
    text = f"{which}: {where} reads {read}{' each' if many else ''}"
    if first.template is None:
        return f"{text}, not traced"
    random = ", random" if first.template.random else ""
    saved = format_bytes(first.template.saved_bytes)
    if first.template.saved_fraction < 1:
        saved += f" as a fraction of {first.template.saved_fraction:g}"
    if first.template.tiles > 1:
        saved += f", {first.template.tiles} tiles"
    return f"{text}, template {first.template.index} (saves {saved}{random})"
