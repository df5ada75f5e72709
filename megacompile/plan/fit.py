"""Explains why a step does not fit into its budgets and what would make it fit, in the same words
everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace

from megacompile.cost.memory import MemoryMoment
from megacompile.cost.optimizer import EIGHT_BITS
from megacompile.cost.places import device_kinds, disk_memory, host_memory
from megacompile.ir.plan import Choice, Places
from megacompile.plan.problem import DEVICE, DISK, HOST, Problem
from megacompile.text import format_bytes

TOLERANCE = 1.1  # a plan may exceed device memory by this factor before it is refused
TRIED = "tried anyway, because predictions may be off by that much"
SMALLER = (
    "use smaller batches or sequences, or raise gpu_memory=; if the head needs the most, let "
    'the model return its loss alone (head="chunked")'
)


def short(memory: str, needed_bytes: int, available_bytes: int) -> str:
    """ "device memory: 12 GiB needed, 10 GiB available"."""
    needed, available = format_bytes(needed_bytes), format_bytes(available_bytes)
    return f"{memory}: {needed} needed, {available} available"


def more(lacks: Mapping[str, int]) -> str:
    """The additional memory that would be enough."""
    parts = " and ".join(f"{format_bytes(size)} more of {name}" for name, size in lacks.items())
    return f"with {parts} it would fit" + (" (disk_memory=)" if DISK in lacks else "")


def device_table(problem: Problem, choice: Choice, peak: MemoryMoment) -> str:
    """Needed device memory by kind, and the available memory; `peak` is the choice's."""
    kinds = device_kinds(peak, (*problem.others, problem.schedule(choice)), problem.optimizer)
    return _table(kinds, peak.total_bytes, problem.budget_bytes)


def _table(kinds: Mapping[str, int], needed: int, available: int | None) -> str:
    rows = sorted(kinds.items(), key=lambda item: -item[1])
    rows += [("needed", needed), *([] if available is None else [("available", available)])]
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"  {what:<{width}}  {format_bytes(size):>10}" for what, size in rows)


def refusal(problem: Problem, choice: Choice, disk_weights: bool | None) -> str:
    """The error text for a model that does not fit: the memories that are too small, a table of the
    bytes in one of them, and changes that would help. `choice` is the closest one; `disk_weights`
    as in the options."""
    lacks, peak = problem.lacking(choice), problem.memory(choice).peak
    device = short(DEVICE, peak.total_bytes, problem.budget_bytes)
    device += f", at {peak.graph} {peak.label}, with every stage recomputed"
    lines, table = [device], device_table(problem, choice, peak)
    if HOST in lacks or DISK in lacks:
        schedule, host = problem.schedule(choice), problem.host_budget_bytes
        kinds = {kind.value: n for kind, n in host_memory(schedule, problem.optimizer).items()}
        if problem.elsewhere_bytes:
            kinds["other buckets"] = problem.elsewhere_bytes
        table = _table(kinds, problem.host_bytes(choice), host)
        on_disk = problem.disk_bytes(choice)
        disk = short(DISK, on_disk, problem.disk_budget_bytes or 0)
        if DISK in lacks or on_disk or problem.disk_budget_bytes is not None:
            whats = (kind.value for kind in disk_memory([schedule], problem.optimizer))
            lines.insert(0, f"{disk} ({' and '.join(whats) or 'nothing'} there)")
        if HOST in lacks:
            lines.insert(0, short(HOST, problem.host_bytes(choice), host or 0))
    changes = [] if DEVICE in lacks else list(_changes(problem, choice, disk_weights))
    if DEVICE in lacks:
        changes.append(SMALLER)
    return "\n".join([f"megacompile(): {lines[0]}", table, *lines[1:], *changes, more(lacks)])


def _changes(problem: Problem, choice: Choice, disk_weights: bool | None) -> Iterator[str]:
    """Changes that would fit without more host memory: optimizer options, up to the first that is
    enough, and a disk."""
    now, schedule = problem.optimizer, problem.schedule(choice)
    left = (problem.host_budget_bytes or sys.maxsize) - problem.elsewhere_bytes
    small = replace(now, state_bytes=EIGHT_BITS) if now.states else now
    options = {"8-bit optimizer states": small}
    if not now.in_backward:  # a backward with the update leaves no gradients
        options["the update in the backward"] = replace(now, in_backward=True)
        options["8-bit states and the update in the backward"] = replace(small, in_backward=True)
    before = sum(host_memory(schedule, now).values())
    for name, cost in options.items():
        size = sum(host_memory(schedule, cost, for_step=not now.in_backward).values())
        if size < before:
            fits = "would fit" if size <= left else "would not fit either"
            yield f"with {name} it {fits}: {format_bytes(size)}"
            if size <= left:
                break
    budget = problem.disk_budget_bytes
    may_move = now.master_bytes is None and all(bucket.ranks == 1 for bucket in problem.buckets)
    weights = True if disk_weights else None if may_move else False
    any_disk = replace(problem, disk_budget_bytes=sys.maxsize, storable=None, disk_weights=weights)
    stored = any_disk.settled(replace(choice, places=Places.of(choice.places.resident)))
    size = any_disk.disk_bytes(stored)
    if not size or not any_disk.fits_host(stored):
        return
    moves = weights is None and bool(stored.places.weights_on_disk)
    how = ["with disk="] if budget is None else []
    how += ["without disk_weights=False"] if moves and disk_weights is False else []
    if how:
        also = ", including parameters" if moves else ""
        yield f"{' and '.join(how)} it would fit: {format_bytes(size)} there{also}"
    elif budget is not None and size > budget:
        yield more({DISK: size - budget})
