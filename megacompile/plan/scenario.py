"""A planned step on a machine: its time, its memory and its bottleneck.

The bottleneck is found by simulation: each resource in turn is made a tenth faster, and the one
that shortens the step most is the bound. A stream can be busy all the time without being the bound,
and host memory bandwidth has no stream.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megacompile.cost.hardware import DISK_RATES, Hardware, pageable_bytes, with_pageable
from megacompile.cost.memory import DeviceMemory, MemoryKind
from megacompile.cost.optimizer import EIGHT_BITS, OptimizerCost
from megacompile.cost.places import (
    device_kinds,
    disk_memory,
    host_memory,
    saved_elsewhere,
)
from megacompile.cost.script import Script
from megacompile.cost.simulate import Prediction, simulate_script
from megacompile.ir import ops
from megacompile.ir.plan import Choice, Places, Plan
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.passes.schedule.insert_disk import (
    LANDING_SETS,
    NEW_SETS,
    STATE_SETS,
    WEIGHT_SETS,
    states_in_use,
)
from megacompile.plan.tiers import Tiers

FASTER = 1.1  # the factor by which a resource is sped up to find its share
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
    """The inputs of a prediction.

    Args:
        schedules: of a step, in the order of their forwards.
        hardware: the machine.
        optimizer: its costs.
        fused: elementwise operations are fused.
        device_bytes: device memory that may be used; None: unknown.
        host_bytes: the same for the host.
        disk_bytes: of the disk for states; None: no disk.
        first: host memory that `megacompile()` needs before the plan, as (what, bytes); () if the
            model is already compiled.
        first_on_disk: the same with parameters on the disk.
        disk_weights: parameters may be on the disk; None: only if nothing else fits; see `Options`.
    """

    schedules: tuple[Schedule, ...]
    hardware: Hardware
    optimizer: OptimizerCost
    fused: bool = True
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    first: Sequence[tuple[str, int]] = ()
    first_on_disk: Sequence[tuple[str, int]] = ()
    disk_weights: bool | None = None
    _kept: dict[Hardware, Prediction] = field(default_factory=dict, init=False, repr=False)

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

    @property
    def device(self) -> DeviceMemory:
        """Device memory over the step."""
        return self.timeline().memory

    def device_kinds(self) -> dict[str, int]:
        """Device memory by kind at its peak, with resident buckets split into their parts."""
        return device_kinds(self.device.peak, self.schedules, self.optimizer)

    def host(self) -> dict[str, int]:
        """Host memory by kind, including activations that wait there."""
        return {kind.value: n for kind, n in host_memory(self.schedules, self.optimizer).items()}

    @property
    def pageable_bytes(self) -> int:
        """Bytes of host memory beyond the system's known limit of page-locked memory."""
        return pageable_bytes(self.hardware, sum(self.host().values()))

    @property
    def pageable_s(self) -> float:
        """Seconds that pageable memory adds to a step of this plan. If everything could be locked,
        another plan might be faster."""
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
                for node in ops.nodes_that(graph, lambda op: op.stored is not None):
                    found[ops.effects(node).stream] += ops.stored_bytes(node)
        return found

    def fewest_stored_bytes(self, *, weights: bool = False) -> int | None:
        """The fewest bytes of optimizer states and saved tensors that must be on a disk of any size
        for the rest to fit on the host; None if even all of them are not enough.

        Args:
            weights: the parameters of as few buckets as necessary may move too. The result is then
                None if they may not, or if all of them are there already.
        """
        every = self.disk_weights is True
        if weights and (every or self.ranks > 1 or self.optimizer.master_bytes is not None):
            return None
        already = frozenset(k for schedule in self.schedules for k in schedule.plan.weights_on_disk)
        buckets = {b.key: b for schedule in self.schedules for b in schedule.buckets}
        resident = frozenset(k for schedule in self.schedules for k in schedule.plan.resident)
        trained: dict[int, Sequence[int]] = {}
        for schedule in self.schedules:
            if schedule.backward is not None:
                trained |= schedule.gradient_params
        waiting = [saved for each in self.schedules for saved in saved_elsewhere(each)]
        changes = any(trained.get(key) for key in buckets if key not in resident)
        sets, new_sets = STATE_SETS, NEW_SETS
        if self.optimizer.in_backward:
            in_use = max(map(_states_in_use, self.schedules), default=0)
            sets, new_sets = max(sets, 1 + in_use), LANDING_SETS
        plan = Plan(
            state_sets=sets,
            weight_sets=WEIGHT_SETS,
            new_weight_sets=new_sets if changes else 0,
        )
        tiers = Tiers(
            buckets=list(buckets.values()),
            trained=trained,
            optimizer=self.optimizer,
            host_bytes=self.host_bytes,
            disk_bytes=sys.maxsize,
            elsewhere_bytes=0,
            here=Places() if weights else Places.of(weights_on_disk=already),
            undecided=frozenset(buckets),
            accumulates=MemoryKind.GRADIENTS.value in self.host(),
            waiting=lambda choice: waiting,
            plan_of_all=lambda: plan,
            disk_weights=every or (None if weights else False),
        )
        choice = tiers.settled(Choice(places=Places.of(resident), offload=1))
        return tiers.of_disk(choice) if tiers.fit(choice) else None

    def host_with_less(self) -> dict[str, int]:
        """Host memory of the same plan with optimizer options that need less, by name."""
        now = self.optimizer
        small = replace(now, state_bytes=EIGHT_BITS) if now.states else now
        options = {"8-bit optimizer states": small}
        for_step = not now.in_backward  # a backward with the update leaves no gradients
        if for_step:
            options["the update in the backward"] = replace(now, in_backward=True)
        if for_step and small != now:
            both = replace(small, in_backward=True)
            options["8-bit states and the update in the backward"] = both
        sums = {
            name: sum(host_memory(self.schedules, cost, for_step=for_step).values())
            for name, cost in options.items()
        }
        before = sum(self.host().values())
        return {name: size for name, size in sums.items() if size < before}

    def bounds(self) -> dict[str, float]:
        """The share of the step that each resource accounts for, the largest first.

        1.0 means that the step speeds up as much as the resource.
        """
        found = {}
        used = {"disk": bool(self.disk()), "interconnect": self.ranks > 1}
        used["network"] = self.replicas > 1
        for name in _RATES:
            if not used.get(name, True):
                continue
            less = self.step_s - self.timeline(faster(self.hardware, name, FASTER)).step_s
            possible = self.step_s * (1 - 1 / FASTER)
            found[name] = max(0.0, less / possible) if possible else 0.0
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def _states_in_use(schedule: Schedule) -> int:
    """The maximum number of streamed buckets whose states a backward uses at once."""
    if schedule.backward is None:
        return 0
    streamed = {bucket.key for bucket in schedule.buckets} - schedule.plan.resident
    return states_in_use(schedule.backward, streamed)


def faster(hardware: Hardware, resource: str, times: float) -> Hardware:
    """The same machine with one resource faster by a factor."""
    rates = {name: getattr(hardware, name) for name in _RATES[resource]}
    changes = {name: rate * times for name, rate in rates.items() if rate is not None}
    if resource == "interconnect":
        changes["collective_s"] = hardware.collective_s / times
    if resource == "network":
        changes["network_gb_s"] = hardware.replicas_gb_s * times
    if resource == "compute":
        changes["launch_s"] = hardware.launch_s / times
    if resource in ("h2d", "d2h"):
        changes["copy_s"] = hardware.copy_s / times
    return replace(hardware, **changes)
