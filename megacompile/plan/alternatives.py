"""Other plans of a model that was captured: other options, more memory, the same passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from megacompile.ir.capture import Capture, Variant
from megacompile.ir.schedule import Schedule
from megacompile.options import Options
from megacompile.plan.compiler import PassCompiler
from megacompile.plan.scenario import Scenario
from megacompile.plan.settled import SettledPlans
from megacompile.text import format_bytes


class Planned(NamedTuple):
    """A captured graph, and what its schedule is built for."""

    stages: Schedule
    capture: Capture
    variant: Variant


def alternatives(
    compiler: PassCompiler, planned: Sequence[Planned], now: Scenario
) -> dict[str, Callable[[], Scenario]]:
    """By name, what each would be; planned when called."""
    options = compiler.setting.options
    budget = compiler.budget.size_bytes()
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

    found: dict[str, Callable[[], Scenario]] = {}
    small = replace(options, state_dtype="int8")
    if states and options.state_dtype != "int8":
        found["8-bit optimizer states"] = lambda: plan(small)
    if states and options.optimizer is None:
        found["update in the backward"] = lambda: plan(_in_backward(options))
        if options.state_dtype != "int8":
            found["update in the backward, 8-bit states"] = lambda: plan(_in_backward(small))
    further = replace(options, lookahead=options.lookahead + 1, slots=options.least_slots + 1)
    found["one slot and one lookahead more"] = lambda: plan(further)
    found["twice the device memory"] = lambda: plan(options, 2 * budget)
    return found


def more_memory(
    compiler: PassCompiler, planned: Sequence[Planned], now: Scenario
) -> dict[str, Callable[[], Scenario]]:
    """By name, the same with a tenth more of the device's memory, of the host's, and of the disk's,
    where something is there.

    What was simulated for the plan that there is need not be simulated again. Plans are sought near
    that one, which fits too. Where host memory was enough for all that was tried, more of it
    changes nothing.
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

    device, host = compiler.budget.size_bytes(), compiler.setting.host_budget_bytes()
    disk = compiler.chooser.disk_budget_bytes()
    found = {
        f"device memory (+{format_bytes(device // 10)})": lambda: plan(
            device * 11 // 10, host, disk
        )
    }
    if host is not None:
        more = f"host memory (+{format_bytes(host // 10)})"
        short = any(compiler.chooser.host_too_small(stages) for stages, _, _ in planned)
        found[more] = lambda: plan(device, host * 11 // 10, disk) if short else now
    if disk is not None and now.disk():
        more = f"disk memory (+{format_bytes(disk // 10)})"
        found[more] = lambda: plan(device, host, disk * 11 // 10)
    return found


def _in_backward(options: Options) -> Options:
    """As `megacompile(model, optimizer=...)` has it; which parameters it updates is not asked."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(0))])
    return replace(options, optimizer=optimizer, device_update=None)
