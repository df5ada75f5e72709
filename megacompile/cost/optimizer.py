"""The cost of the optimizer in a step: bytes in host memory, and time on the CPU.

    exact            the CPU updates bucket after bucket, in forward order, during the next forward;
                     the device updates residents and device-updated buckets
    in the backward  the schedule has the update; the CPU does nothing

An update on the CPU is bound by host memory. AdamW with bf16 parameters and gradients and float32
moments reads and writes 22 bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megacompile.ir.buckets import Bucket, largest_shard
from megacompile.ir.schedule import Schedule
from megacompile.options import Options
from megacompile.runtime.optim.blockwise import BLOCK
from megacompile.runtime.optim.rules import rule_of

EIGHT_BITS = 1.0 + 4.0 / BLOCK  # bytes of an 8-bit state: a code, and its share of a float32 scale

# Seconds per billion parameters if arithmetic is the limit, measured on 16 CPU cores.
_EIGHT_BITS_S = 2.5
_STOCHASTIC_S = 0.8


# Updates in chunks (`megacompile.runtime.updates.workers`).
CHUNKS = 3  # in flight: one is fetched, one updated, one copied back
CHUNK_BYTES = 96 * 2**20  # about two milliseconds on the link
LEAST_HELPED = 2**20  # parameters of a bucket; smaller ones are not worth the copies


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """The properties of an optimizer that determine time and memory. Bytes are per element."""

    states: int = 2  # per parameter; AdamW has two
    state_bytes: float | None = None  # None: same as the parameter
    master_bytes: float | None = None  # None: the streamed parameters are the masters
    grad_bytes: float | None = None  # None: same as the parameter
    in_backward: bool = False
    arithmetic_s: float = 0.0  # per billion elements, if it may exceed the memory time
    helped: bool = False  # the device helps with host updates

    @staticmethod
    def of(
        options: Options, *, states: int | None = None, on_gpu: bool | None = None
    ) -> OptimizerCost:
        """The costs of an optimizer under these options. `states` per parameter: by default the
        optimizer's, or 2. `on_gpu`: by default according to the options' device."""
        optimizer, dtype = options.optimizer, options.state_dtype
        if states is None:
            rule, states = None if optimizer is None else rule_of(optimizer), 2
            if optimizer is not None and rule is not None:  # of the group with the most
                states = max(len(rule.state_names(group)) for group in optimizer.param_groups)
        slow_s = _EIGHT_BITS_S if dtype == "int8" and states else 0.0
        if options.stochastic_rounding:
            slow_s = max(slow_s, _STOCHASTIC_S)
        state_bytes = float(dtype.itemsize) if isinstance(dtype, torch.dtype) else None
        on_gpu = options.device.type == "cuda" if on_gpu is None else on_gpu
        return OptimizerCost(
            states=states,
            state_bytes=EIGHT_BITS if dtype == "int8" else state_bytes,
            master_bytes=None if options.compute_dtype is None else 4.0,
            grad_bytes=None if options.grad_dtype is None else float(options.grad_dtype.itemsize),
            in_backward=optimizer is not None,
            arithmetic_s=slow_s if optimizer is None else 0.0,
            helped=options.device_helps and on_gpu,
        )

    def master_of(self, item_bytes: int) -> float:
        """Bytes of an element of the master parameter."""
        return float(item_bytes) if self.master_bytes is None else self.master_bytes

    def states_of(self, item_bytes: int) -> float:
        """Bytes of an element's states."""
        each = self.master_of(item_bytes) if self.state_bytes is None else self.state_bytes
        return self.states * each

    def updated_of(self, item_bytes: int) -> float:
        """Bytes that an update reads and writes: the parameter and its states."""
        return self.master_of(item_bytes) + self.states_of(item_bytes)

    def resident_bytes(
        self, bucket: Bucket, trained: Iterable[int], *, gradients: bool = True
    ) -> float:
        """Device memory of a resident bucket: parameters, states and, with `gradients`, those
        that `optimizer.step()` takes. Accumulated gradients of updates in the backward are not
        counted."""
        bucket = largest_shard(bucket)
        masters = (self.master_bytes or 0.0) * sum(param.numel for param in bucket.params)
        size = bucket.size_bytes + masters  # frozen parameters have a master too
        for param in (bucket.params[i] for i in trained):
            item = param.dtype.itemsize
            gradient = self.kept_grad_of(item) if gradients else 0.0
            size += param.numel * (gradient + self.states_of(item))
        return size

    def kept_grad_of(self, item_bytes: int) -> float:
        """Bytes of a gradient element between backward and step; 0 if the backward consumes it."""
        return 0.0 if self.in_backward else self.grad_of(item_bytes)

    def grad_of(self, item_bytes: int) -> float:
        """Bytes of a gradient element outside the backward, by default those of the master."""
        return self.master_of(item_bytes) if self.grad_bytes is None else self.grad_bytes


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """The update of one bucket."""

    bucket: Bucket
    numel: int
    size_bytes: float  # read plus written
    grad_bytes: float  # the gradient's part of that
    helped_bytes: float  # in chunks, twice the link's busier direction; 0: the device cannot help
    arithmetic_s: float  # on the host, if it may exceed the memory time


def host_updates(schedule: Schedule, optimizer: OptimizerCost) -> list[UpdateCost]:
    """The updates that the CPU runs between steps, in forward order."""
    on_device = schedule.plan.resident | schedule.plan.device_update
    return [u for u in updates(schedule, optimizer) if u.bucket.key not in on_device]


def updates(schedule: Schedule, optimizer: OptimizerCost) -> list[UpdateCost]:
    """All updates of `optimizer.step()`, in forward order."""
    if optimizer.in_backward or schedule.backward is None:
        return []
    trained = schedule.gradient_params
    found = []
    for bucket in schedule.buckets:
        mine = largest_shard(bucket)
        params = [mine.params[i] for i in trained.get(bucket.key, ())]
        updated = gradient = copy = 0.0
        for param in params:
            item = param.dtype.itemsize
            updated += param.numel * optimizer.updated_of(item)
            gradient += param.numel * optimizer.grad_of(item)
            copy += 0.0 if optimizer.master_bytes is None else param.numel * item
        numel = sum(param.numel for param in params)
        helped = 2 * (updated + max(gradient, copy))
        on_host = bucket.key not in schedule.plan.on_disk | schedule.plan.weights_on_disk
        if not (optimizer.helped and on_host) or numel < LEAST_HELPED:
            helped = 0.0
        if params:
            moved = 2 * updated + gradient + copy
            arithmetic_s = numel / 1e9 * optimizer.arithmetic_s
            found.append(UpdateCost(bucket, numel, moved, gradient, helped, arithmetic_s))
    return found


def chunks_bytes(schedule: Schedule, optimizer: OptimizerCost) -> int:
    """Device memory for host updates in chunks, at the start of the forward."""
    largest = max((u.helped_bytes / 2 for u in host_updates(schedule, optimizer)), default=0.0)
    return CHUNKS * min(int(largest), CHUNK_BYTES)
