"""Whether a step fits into its budgets, and what would make it fit: the same words everywhere."""

from __future__ import annotations

from megacompile.cost.memory import Kind
from megacompile.plan.scenario import Scenario
from megacompile.text import format_bytes


def why_not(now: Scenario) -> tuple[str, ...]:
    """What is too small, and the smallest changes that would do; () where it fits or may fit."""
    lines: tuple[str, ...] = ()
    needed, there = now.device.peak.total_bytes, now.device_bytes
    if there is not None and needed > there:
        lines += (
            f"device memory: {format_bytes(needed)} needed, {format_bytes(there)} there; smaller "
            "batches or sequences need less",
        )
    return lines + _host_too_small(now)


def refusal(now: Scenario) -> str:
    """The error of a step that does not fit into host memory, with the table."""
    first, *others = _host_too_small(now)
    rows = [*now.host().items(), ("needed", sum(now.host().values()))]
    rows.append(("there", now.host_bytes or 0))
    if now.disk_bytes is not None:
        rows += [("on the disk", sum(now.disk().values())), ("there", now.disk_bytes)]
    width = max(len(kind) for kind, _ in rows)
    lines = [f"  {kind:<{width}}  {format_bytes(size):>10}" for kind, size in rows]
    resident = {key for schedule in now.schedules for key in schedule.plan.resident}
    if resident:
        count = len({b.key for schedule in now.schedules for b in schedule.buckets})
        lines.append(
            f"  ({len(resident)} of {count} buckets live on the device: no more fit there)"
        )
    return "\n".join([f"megacompile(): {first}", *lines, *others])


def _host_too_small(now: Scenario) -> tuple[str, ...]:
    """What is missing, the optimizer's options up to the first that would do, and how much more
    memory would."""
    needed, there = sum(now.host().values()), now.host_bytes
    if there is None or needed <= there:
        return ()
    lines = [f"host memory: {format_bytes(needed)} needed, {format_bytes(there)} there"]
    if now.disk_bytes is not None:
        there_now = now.disk()
        what = " and ".join(there_now) or Kind.STATES.value
        lines[0] += (
            f" (with {format_bytes(sum(there_now.values()))} of {what} on the disk, "
            f"which holds {format_bytes(now.disk_bytes)})"
        )
    for name, size in now.host_with_less().items():
        fits = "would fit" if size <= there else "would not fit either"
        lines.append(f"with {name} it {fits}: {format_bytes(size)}")
        if size <= there:
            break
    stored = now.fewest_stored_bytes()
    if stored is not None and now.disk_bytes is None:
        lines.append(f"with disk= it would fit: {format_bytes(stored)} there")
    elif stored is not None and stored > (now.disk_bytes or 0):
        more = format_bytes(stored - (now.disk_bytes or 0))
        lines.append(f"with {more} more of the disk it would fit (disk_memory=, or a larger disk)")
    return (*lines, f"with {format_bytes(needed - there)} more of host memory it would fit")
