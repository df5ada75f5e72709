"""Explains why a step does not fit into its budgets and what would make it fit, in the same words
everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from megacompile.cost.memory import MemoryKind, MemoryMoment
from megacompile.cost.places import device_kinds
from megacompile.host_memory import too_small
from megacompile.ir.plan import Choice
from megacompile.plan.problem import Problem
from megacompile.plan.scenario import Scenario
from megacompile.text import format_bytes

_LARGER_DISK = "disk_memory=, or a larger disk"
TOLERANCE = 1.1  # a plan may exceed device memory by this factor before it is refused
TRIED = "tried anyway"
_SMALLER = (
    "use smaller batches or sequences, or raise gpu_memory=; if the head needs the most, let "
    'the model return its loss alone (head="chunked")'
)


def why_not(now: Scenario) -> tuple[str, ...]:
    """The memory that is too small and the smallest changes that would fix it; () if the step fits
    or may fit."""
    over = _device_over_bytes(now)
    if ahead := _first_too_small(now, over):
        return ahead
    if not over:
        return _too_small(now, 0)
    first = device_short(now.device.peak.total_bytes, now.device_bytes)
    if is_tried(now):
        first += f": {TRIED}, because predictions may be off by that much"
    return first, *(_too_small(now, over) or _more(device=over)), _SMALLER


def is_tried(now: Scenario) -> bool:
    """True if only the device is too small, and by so little that the step is tried anyway."""
    most = TOLERANCE * (now.device_bytes or 0)
    little = 0 < _device_over_bytes(now) and now.device.peak.total_bytes <= most
    return little and not (_first_too_small(now, 0) or _too_small(now, 0))


def device_short(needed_bytes: int, available_bytes: int | None) -> str:
    """ "device memory: 12 GiB needed, 10 GiB available"."""
    return _short("device memory", needed_bytes, available_bytes)


def device_table(problem: Problem, choice: Choice, peak: MemoryMoment) -> str:
    """Needed device memory by kind, and the available memory; `peak` is the choice's."""
    schedules = (*problem.others, problem.schedule(choice))
    kinds = device_kinds(peak, schedules, problem.optimizer)
    rows = sorted(kinds.items(), key=lambda item: -item[1])
    rows += [("needed", peak.total_bytes), ("available", problem.budget_bytes)]
    return "\n".join(_table(rows))


def device_refusal(problem: Problem, choice: Choice, peak: MemoryMoment) -> str:
    """The error text of a model that needs too much device memory.

    Args:
        choice: the closest one; its peak is `peak`.
    """
    how = "".join(
        f", {text}"
        for text, holds in (
            (f"{len(choice.places.resident)} buckets resident", choice.places.resident),
            (f"the inputs of {choice.offload} stages on the host", choice.offload),
            (f"{choice.rerun} stages run again", choice.rerun),
        )
        if holds
    )
    host, available = format_bytes(problem.host_bytes(choice)), "an unknown amount"
    if problem.host_budget_bytes is not None:
        available = format_bytes(problem.host_budget_bytes)
    needed, budget = peak.total_bytes, problem.budget_bytes
    return "\n".join(
        [
            f"megacompile(): {device_short(needed, budget)}, at {peak.graph} {peak.label}, with "
            f"every stage recomputed{how}",
            device_table(problem, choice, peak),
            f"(host memory: {host} needed, {available} available)",
            *_more(device=needed - budget),
            _SMALLER,
        ]
    )


def _device_over_bytes(now: Scenario) -> int:
    available = now.device_bytes
    return 0 if available is None else max(0, now.device.peak.total_bytes - available)


def _first_too_small(now: Scenario, device_over_bytes: int) -> tuple[str, ...]:
    """The error of `megacompile()` before any plan, if the parameters do not fit on the host, where
    all of them start; with changes that would fix it."""
    available = now.host_bytes
    if available is None or not (lines := too_small(now.first, available)):
        return ()
    needed = max(sum(size for _, size in now.first), sum(now.host().values()))
    disk = max(0, sum(now.disk().values()) - (now.disk_bytes or 0))
    able = now.fewest_stored_bytes(weights=True) is not None
    if able and not (device_over_bytes or too_small(now.first_on_disk, available)):
        how = _to_have_weights_there(now)
        lines += (f"{how} it would fit: parameters beyond host memory wait there for the plan",)
    return *lines, *_more(device=device_over_bytes, host=needed - available, disk=disk)


def host_refusal(problem: Problem, choice: Choice, disk_weights: bool | None) -> str:
    """The error text of a model that needs too much host memory or disk.

    Args:
        choice: the closest one.
        disk_weights: may parameters be on the disk? See `Scenario`.
    """
    host = problem.host_budget_bytes
    now = Scenario(
        (problem.schedule(choice),),
        problem.hardware,
        problem.optimizer,
        problem.fused,
        problem.budget_bytes,
        None if host is None else host - problem.elsewhere_bytes,
        problem.disk_budget_bytes,
        disk_weights=disk_weights,
    )
    return _refusal(now, problem.peak_bytes(choice))


def _refusal(now: Scenario, device_needed_bytes: int) -> str:
    """The error text of a step that does not fit, with its needs of each memory.

    Args:
        now: the step closest to the budgets; it needs more host memory or disk.
        device_needed_bytes: including other captured graphs.
    """
    available = now.device_bytes
    over = 0 if available is None else max(0, device_needed_bytes - available)
    first, *others = _too_small(now, over)
    rows = [*now.host().items(), ("needed", sum(now.host().values()))]
    rows += [] if now.host_bytes is None else [("available", now.host_bytes)]
    if available is not None:
        rows += [("on the device", device_needed_bytes), ("available on the device", available)]
    if now.disk_bytes is not None:
        rows += [("on the disk", sum(now.disk().values()))]
        rows += [("available on the disk", now.disk_bytes)]
    lines = _table(rows)
    resident = {key for schedule in now.schedules for key in schedule.plan.resident}
    if resident:
        count = len({b.key for schedule in now.schedules for b in schedule.buckets})
        lines.append(f"  ({len(resident)} of {count} buckets are resident: no more fit)")
    return "\n".join([f"megacompile(): {first}", *lines, *others])


def _table(rows: Sequence[tuple[str, int]]) -> list[str]:
    width = max(len(what) for what, _ in rows)
    return [f"  {what:<{width}}  {format_bytes(size):>10}" for what, size in rows]


def _too_small(now: Scenario, device_over_bytes: int) -> tuple[str, ...]:
    """Bytes missing on the host, or else on the disk, with changes that would fix it."""
    return _host_too_small(now, device_over_bytes) or _disk_too_small(now, device_over_bytes)


def _host_too_small(now: Scenario, device_over_bytes: int) -> tuple[str, ...]:
    """The missing bytes, the optimizer options to try (up to the first that would fit), and the
    additional memory that would be enough."""
    needed, available = sum(now.host().values()), now.host_bytes
    if available is None or needed <= available:
        return ()
    lines = [_short("host memory", needed, available)]
    if now.disk_bytes is not None:
        on_disk = now.disk()
        what = " and ".join(on_disk) or MemoryKind.STATES.value
        lines[0] += (
            f" (with {format_bytes(sum(on_disk.values()))} of {what} on the disk, "
            f"which holds {format_bytes(now.disk_bytes)})"
        )
    lines += _instead(now, available, device_over_bytes)
    return (*lines, *_more(device=device_over_bytes, host=needed - available))


def _instead(now: Scenario, available: int, device_over_bytes: int) -> list[str]:
    """Changes that would fit without more host memory."""
    lines: list[str] = []
    for name, size in now.host_with_less().items() if not device_over_bytes else ():
        fits = "would fit" if size <= available else "would not fit either"
        lines.append(f"with {name} it {fits}: {format_bytes(size)}")
        if size <= available:
            break
    stored, on_disk = now.fewest_stored_bytes(), now.disk_bytes
    if stored is not None and on_disk is not None and stored > on_disk:
        lines += _more(device=device_over_bytes, disk=stored - on_disk)
    elif stored is not None and on_disk is None and not device_over_bytes:
        lines.append(f"with disk= it would fit: {format_bytes(stored)} there")
    elif stored is None and not device_over_bytes:
        lines += _with_weights(now)
    return lines


def _with_weights(now: Scenario) -> list[str]:
    """The change that moves parameters to the disk too, if states and saved tensors there are not
    enough."""
    stored, on_disk = now.fewest_stored_bytes(weights=True), now.disk_bytes
    if stored is None:
        return []
    how = _to_have_weights_there(now)
    if on_disk is None:
        return [f"{how} it would fit: {format_bytes(stored)} there, including parameters"]
    if stored <= on_disk:
        return [f"{how} it would fit: {format_bytes(stored)} on the disk"] if how else []
    more = f"with {format_bytes(stored - on_disk)} more of the disk"
    return [f"{how and f'{how} and '}{more} it would fit ({_LARGER_DISK})"]


def _to_have_weights_there(now: Scenario) -> str:
    """The change of options that allows parameters on a disk."""
    without = "" if now.disk_weights is None else "without disk_weights=False"
    if now.disk_bytes is not None:
        return without
    return f"with disk={without and f', {without},'}"


def _disk_too_small(now: Scenario, device_over_bytes: int) -> tuple[str, ...]:
    needed, available = sum(now.disk().values()), now.disk_bytes or 0
    if needed <= available:
        return ()
    more = _more(device=device_over_bytes, disk=needed - available)
    return (_short("the disk", needed, available), *more)


def _short(memory: str, needed: int, available: int | None) -> str:
    return f"{memory}: {format_bytes(needed)} needed, {format_bytes(available or 0)} available"


def _more(*, device: int = 0, host: int = 0, disk: int = 0) -> tuple[str, ...]:
    """The additional memory that would be enough; () if nothing is missing."""
    sizes = {"device memory": device, "host memory": host, "the disk": disk}
    parts = [f"{format_bytes(size)} more of {name}" for name, size in sizes.items() if size]
    where = f" ({_LARGER_DISK})" if disk else ""
    return (f"with {' and '.join(parts)} it would fit{where}",) if parts else ()
