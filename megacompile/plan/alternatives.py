"""Alternatives to a planned step and their gains: other options, more memory, a faster machine.

For other options and more memory, the captured graphs are planned again. For a faster machine, the
current plan is simulated with other rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from megacompile.cost.hardware import Hardware
from megacompile.cost.memory import MemoryKind
from megacompile.errors import MegacompileError
from megacompile.ir.capture import Capture, Variant
from megacompile.ir.schedule import Schedule
from megacompile.options import Options
from megacompile.plan.compiler import PassCompiler, SettledPlans
from megacompile.plan.scenario import FASTER, Scenario, faster
from megacompile.text import format_bytes

_HOST = ("host memory bandwidth", "host update")
_OF_BATCH = (MemoryKind.INPUTS, MemoryKind.ACTIVATIONS, MemoryKind.SAVED, MemoryKind.WORKSPACE)


class Planned(NamedTuple):
    """A captured graph and the variant that its schedule is built for."""

    stages: Schedule
    capture: Capture
    variant: Variant


@dataclass(frozen=True, slots=True)
class Change:
    """An alternative and its predicted effect."""

    name: str
    gain: float | None = None  # of throughput: 0.1 is 10 % more; None: does not fit
    step_s: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    note: str = ""


def changes(
    now: Scenario, compiler: PassCompiler | None = None, planned: Sequence[Planned] = ()
) -> tuple[Change, ...]:
    """The changes worth considering, the largest gain first.

    Args:
        now: the current step.
        compiler: makes other plans; None: keep the current one.
        planned: the captured graphs.
    """
    found = [] if compiler is None else _other_options(now, compiler, planned)
    if any(schedule.backward is not None for schedule in now.schedules):
        found.append(_twice_the_batch(now))
    if now.optimizer.states and not now.optimizer.in_backward:
        found.append(_faster(now, "a host with memory and CPU twice as fast", _HOST))
    found.append(_faster(now, "a link to the host twice as fast", ("h2d", "d2h")))
    return tuple(sorted(found, key=lambda change: 1.0 if change.gain is None else -change.gain))


def budgets(
    now: Scenario, compiler: PassCompiler | None = None, planned: Sequence[Planned] = ()
) -> tuple[Change, ...]:
    """The gain from a tenth more of each resource. For more memory the graphs are planned again, if
    `compiler` is given. The current plan is simulated with a faster disk and, if the system limits
    page-locked memory, with a higher limit."""
    found = [] if compiler is None else _more_memory(now, compiler, planned)
    if short := now.pageable_bytes:
        size = min(short, -(-sum(now.host().values()) // 10))
        locked = replace(now.hardware, locked_bytes=size + (now.hardware.locked_bytes or 0))
        found.append(_on(now, f"page-locked memory (+{format_bytes(size)})", locked))
    if now.disk():
        found.append(_faster(now, "rate of the disk", ("disk",), FASTER))
    return tuple(found)


def _other_options(
    now: Scenario, compiler: PassCompiler, planned: Sequence[Planned]
) -> list[Change]:
    """Plan with other options, and with twice the device memory."""
    options, budget = compiler.setting.options, compiler.budget.size_bytes()
    states = now.optimizer.states

    def plan(changed: Options, budget_bytes: int = budget) -> Scenario:
        other = compiler.other(changed, hardware=now.hardware, budget_bytes=budget_bytes)
        plans = SettledPlans(other)
        update = changed.optimizer is not None
        schedules = tuple(
            plans.schedule(stages, capture, replace(variant, update=update), draft=True)
            for stages, capture, variant in planned
        )
        cost = other.setting.cost(states=states)
        return replace(now, schedules=schedules, optimizer=cost, device_bytes=budget_bytes)

    small = replace(options, state_dtype="int8")
    tried: dict[str, Options] = {}
    if states and options.state_dtype != "int8":
        tried["8-bit optimizer states"] = small
    if states and options.optimizer is None:
        tried["update in the backward"] = _in_backward(options)
        if options.state_dtype != "int8":
            tried["update in the backward, 8-bit states"] = _in_backward(small)
    tried["one more slot and lookahead"] = replace(
        options, lookahead=options.lookahead + 1, slots=options.least_slots + 1
    )
    found = [_tried(now, name, partial(plan, changed)) for name, changed in tried.items()]
    return [*found, _tried(now, "twice the device memory", partial(plan, options, 2 * budget))]


def _more_memory(now: Scenario, compiler: PassCompiler, planned: Sequence[Planned]) -> list[Change]:
    """Plan with a tenth more device memory, host memory and, if the plan uses a disk, disk memory.

    Each search starts near the current plan, which still fits, and reuses its simulations. If host
    memory never ruled out a candidate, more of it changes nothing.
    """
    options = compiler.setting.options

    def plan(device_bytes: int, host_bytes: int | None, disk_bytes: int | None) -> Scenario:
        changed = options
        if options.host_memory is not None and host_bytes is not None:
            changed = replace(options, host_memory=max(options.host_memory, host_bytes))
        other = compiler.other(
            changed,
            hardware=replace(now.hardware, host_bytes=host_bytes),
            budget_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_budget_bytes=disk_bytes,
            same=True,
        )
        plans = SettledPlans(other)
        schedules = tuple(plans.schedule(*each, draft=True) for each in planned)
        more = replace(
            now,
            schedules=schedules,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
        )
        return min(now, more, key=lambda each: each.step_s)

    def add(memory: str, size: int, build: Callable[[], Scenario]) -> None:
        found.append(_tried(now, f"{memory} memory (+{format_bytes(size // 10)})", build))

    found: list[Change] = []
    device, host = compiler.budget.size_bytes(), compiler.setting.host_budget_bytes()
    disk = compiler.budget.disk_bytes()
    add("device", device, lambda: plan(device * 11 // 10, host, disk))
    if host is not None:
        short = any(compiler.chooser.host_too_small(stages) for stages, _, _ in planned)
        add("host", host, lambda: plan(device, host * 11 // 10, disk) if short else now)
    if disk is not None and now.disk():
        add("disk", disk, lambda: plan(device, host, disk * 11 // 10))
    return found


def _in_backward(options: Options) -> Options:
    """The options of `megacompile(model, optimizer=...)`; plans ignore which parameters that
    optimizer updates."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(0))])
    return replace(options, optimizer=optimizer, device_update=None)


def _tried(now: Scenario, name: str, build: Callable[[], Scenario]) -> Change:
    """The effect of another plan, or the reason why it does not fit."""
    try:
        other = build()
    except MegacompileError as error:
        return Change(name, note="does not fit: " + str(error).splitlines()[0])
    gain = now.step_s / other.step_s - 1
    device, host = other.device.peak.total_bytes, sum(other.host().values())
    return Change(name, gain, other.step_s, device, host)


def _faster(now: Scenario, name: str, resources: Sequence[str], times: float = 2.0) -> Change:
    machine = now.hardware
    for resource in resources:
        machine = faster(machine, resource, times)
    return _on(now, name, machine)


def _on(now: Scenario, name: str, machine: Hardware) -> Change:
    """The same plan on another machine."""
    step_s = now.timeline(machine).step_s
    return Change(name, now.step_s / step_s - 1, step_s)


def _twice_the_batch(now: Scenario) -> Change:
    """Estimate by doubling every compute's time, because no graph of that batch was captured."""
    step_s = now.timeline(faster(now.hardware, "compute", 0.5)).step_s
    needed = max(
        moment.total_bytes + sum(moment.live_bytes.get(kind, 0) for kind in _OF_BATCH)
        for moment in now.device.moments
    )
    note = "assumes that computes take twice as long"
    if now.device_bytes is not None and needed > now.device_bytes:
        note += f"; this plan would need {format_bytes(needed)} of device memory"
    return Change("twice the batch", 2 * now.step_s / step_s - 1, step_s, needed, note=note)
