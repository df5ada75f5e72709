"""A planned step on a machine: its time, its memory and its bottleneck.

The bottleneck is found by simulation: each resource in turn is made a tenth faster, and the one
that shortens the step most is the bound. A stream can be busy all the time without being the bound.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megacompile.cost.hardware import DISK_RATES, Hardware, with_pageable
from megacompile.cost.memory import DeviceMemory, device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.places import disk_memory, host_memory
from megacompile.cost.simulate import Prediction, Script, simulate_script
from megacompile.errors import MegacompileError
from megacompile.host_memory import total_bytes
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.options import Lowering, Options
from megacompile.plan.compiler import PassCompiler, SettledPlans
from megacompile.plan.pipeline import Planned

_FASTER = 1.1  # the factor by which a resource is sped up to find its share
_RATES = {  # the rates of `Hardware` that make up a resource
    "compute": ("matmul_tflop_s", "matmul32_tflop_s", "matmul8_tflop_s", "memory_gb_s"),
    "h2d": ("h2d_gb_s", "h2d_both_gb_s"),
    "d2h": ("d2h_gb_s", "d2h_both_gb_s"),
    "host memory bandwidth": ("host_memory_gb_s",),
    "host update": ("update_gb_s",),
    "interconnect": ("interconnect_gb_s",),
    "network": ("network_gb_s",),
    "disk": DISK_RATES,
}


@dataclass(frozen=True)
class Scenario:
    """The inputs of a prediction: the schedules of a step, in the order of their forwards, on a
    machine. Budgets are in bytes; None: unknown, or no disk."""

    schedules: tuple[Schedule, ...]
    hardware: Hardware
    optimizer: OptimizerCost
    fused: bool = True
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    _kept: dict[Hardware, Prediction] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, compiler: PassCompiler, made: Sequence[Schedule], hardware: Hardware) -> Scenario:
        """A step of the schedules that a compiler made, on a machine."""
        return cls(
            tuple(made),
            hardware,
            compiler.setting.cost(),
            compiler.setting.options.lowering is Lowering.INDUCTOR,
            compiler.budget.limit_bytes or hardware.device_bytes,
            compiler.setting.host_budget_bytes() or hardware.host_bytes or total_bytes(),
            compiler.budget.disk_bytes(),
        )

    def timeline(self, hardware: Hardware | None = None) -> Prediction:
        """Simulate three steps; the period of the last is a training step."""
        machine = hardware or self.hardware
        if machine not in self._kept:
            rates = with_pageable(machine, sum(self.host().values()))
            self._kept[machine] = simulate_script(self._script, rates, steps=3)
        return self._kept[machine]

    @functools.cached_property
    def _script(self) -> Script:
        return Script(self.schedules, self.optimizer, fused=self.fused)

    @property
    def ranks(self) -> int:
        """Number of ranks that share the model."""
        return max((b.ranks for schedule in self.schedules for b in schedule.buckets), default=1)

    @property
    def replicas(self) -> int:
        """Number of ranks that have the same shard."""
        return max((b.replicas for schedule in self.schedules for b in schedule.buckets), default=1)

    @property
    def step_s(self) -> float:
        return self.timeline().step_s

    @functools.cached_property
    def device(self) -> DeviceMemory:
        """Device memory over the step."""
        return device_memory(self.schedules, optimizer=self.optimizer, fused=self.fused)

    def host(self) -> dict[str, int]:
        """Host memory by kind, including activations that wait there."""
        return {kind.value: n for kind, n in host_memory(self.schedules, self.optimizer).items()}

    @property
    def needed(self) -> tuple[int, int]:
        """Bytes on the device at its peak, and on the host."""
        return self.device.peak.total_bytes, sum(self.host().values())

    @property
    def pageable_s(self) -> float:
        """Seconds that pageable memory, beyond the system's known limit of page-locked memory, adds
        to a step of this plan. If everything could be locked, another plan might be faster."""
        return self.step_s - self.timeline(replace(self.hardware, locked_bytes=None)).step_s

    def disk(self) -> dict[str, int]:
        """Disk space by kind, in bytes."""
        return {kind.value: n for kind, n in disk_memory(self.schedules, self.optimizer).items()}

    def disk_traffic(self) -> dict[Stream, int]:
        """Bytes that a step reads from the disk and writes to it, without padding to whole
        pages."""
        found = {Stream.READ: 0, Stream.WRITE: 0}
        for schedule in self.schedules:
            for graph in schedule.graphs.values():
                for node in ops.nodes_that(graph, lambda op: op.on_disk):
                    found[ops.effects(node).stream] += ops.moved_bytes(node)
        return found

    def bounds(self) -> dict[str, float]:
        """The share of the step that each resource accounts for, the largest first; 1.0: the step
        speeds up as much as the resource."""
        used = {"disk": bool(self.disk()), "interconnect": self.ranks > 1}
        used["network"] = self.replicas > 1
        found, possible = {}, self.step_s * (1 - 1 / _FASTER)
        for name in _RATES:
            if used.get(name, True):
                less = self.step_s - self.timeline(_faster(self.hardware, name)).step_s
                found[name] = max(0.0, less / possible) if possible else 0.0
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _faster(hardware: Hardware, resource: str) -> Hardware:
    """The same machine with one resource faster by `_FASTER`."""
    rates = {name: getattr(hardware, name) for name in _RATES[resource]}
    if resource == "network":
        rates["network_gb_s"] = hardware.replicas_gb_s
    changes = {name: rate * _FASTER for name, rate in rates.items() if rate is not None}
    per_op = {"interconnect": "collective_s", "compute": "launch_s"}
    per_op |= dict.fromkeys(("h2d", "d2h"), "copy_s")
    if (name := per_op.get(resource)) is not None:
        changes[name] = getattr(hardware, name) / _FASTER
    return replace(hardware, **changes)


# Alternatives to a planned step: the captured graphs are planned again, with other options or more
# memory.


@dataclass(frozen=True, slots=True)
class Change:
    """An alternative and its predicted effect."""

    name: str
    gain: float | None = None  # of throughput: 0.1 is 10 % more; None: does not fit
    step_s: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    note: str = ""  # why it does not fit


def changes(
    now: Scenario, compiler: PassCompiler, planned: Sequence[Planned]
) -> tuple[Change, ...]:
    """The changes worth considering, the largest gain first: other options, and twice the memory of
    the device or the host. `compiler` plans the captured graphs in `planned` again."""
    options, states = compiler.setting.options, now.optimizer.states
    # plans ignore which parameters the optimizer of `megacompile(model, optimizer=...)` updates
    optimizer = torch.optim.AdamW([nn.Parameter(torch.empty(0))])
    in_backward = {"optimizer": optimizer, "device_update": None}
    tried: dict[str, dict[str, Any]] = {}
    if states and options.state_dtype != "int8":
        tried["8-bit optimizer states"] = {"state_dtype": "int8"}
    if states and options.optimizer is None:
        tried["update in the backward"] = in_backward
        if options.state_dtype != "int8":
            tried["update in the backward, 8-bit states"] = in_backward | {"state_dtype": "int8"}
    ahead = {"lookahead": options.lookahead + 1, "slots": options.least_slots + 1}
    tried["one more slot and lookahead"] = ahead
    plan = partial(_again, now, compiler, planned)
    found = [plan(name, replace(options, **changed)) for name, changed in tried.items()]
    twice = 2 * compiler.budget.size_bytes()
    found.append(plan("twice the device memory", options, device_bytes=twice))
    if host := compiler.setting.host_budget_bytes():  # 0: the device's is the only memory
        more = options
        if options.host_memory is not None:
            more = replace(options, host_memory=max(options.host_memory, 2 * host))
        found.append(plan("twice the host memory", more, host_bytes=2 * host))
    return tuple(sorted(found, key=lambda change: 1.0 if change.gain is None else -change.gain))


def _again(
    now: Scenario,
    compiler: PassCompiler,
    planned: Sequence[Planned],
    name: str,
    options: Options,
    *,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
) -> Change:
    """The effect of planning with other options, or with larger budgets, in which the current plan
    may be the fastest if it fits; or the reason why nothing fits."""
    other = compiler.other(
        options,
        hardware=replace(now.hardware, host_bytes=host_bytes or now.hardware.host_bytes),
        budget_bytes=device_bytes or compiler.budget.size_bytes(),
        host_bytes=host_bytes,
    )
    plans, update = SettledPlans(other), options.optimizer is not None
    try:
        schedules = tuple(
            plans.schedule(each._replace(variant=replace(each.variant, update=update)), draft=True)
            for each in planned
        )
    except MegacompileError as error:
        return Change(name, note="does not fit: " + str(error).splitlines()[0])
    optimizer = other.setting.cost(states=now.optimizer.states)
    found = replace(now, schedules=schedules, optimizer=optimizer)
    room = device_bytes or now.device_bytes, host_bytes or now.host_bytes
    if all(size <= (most or size) for size, most in zip(now.needed, room, strict=True)) and (
        device_bytes or host_bytes
    ):
        found = min(now, found, key=lambda each: each.step_s)
    return Change(name, now.step_s / found.step_s - 1, found.step_s, *found.needed)
