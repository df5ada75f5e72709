"""The setting of plans: the options, and the machine whose rates and memory count."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace

from megacompile import compat
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.rates import cached, load, load_disk
from megacompile.host_memory import PAGE_LOCKS
from megacompile.options import Options

_MARGIN = 0.05  # of free device memory, for unplanned uses: fragmentation, cuBLAS, NCCL
_MARGIN_BYTES = 4 * 2**30  # at most: these hardly grow with the memory
_ASSUMED = H200.replace(
    name="this CPU (rates of an H200 assumed; python -m megacompile hardware measures its own)"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """The options of a model and the machine to plan for."""

    options: Options  # validated
    hardware: Hardware | None = None  # the GPU to plan for; None: the device of the options
    host_bytes: int | None = None  # for the model; None: that of `hardware`, or unknown
    of_ranks: Hardware | None = None  # slowest rates of the ranks, if known
    disk_bytes: int | None = None  # one rank's share of a disk; None: not shared
    least: Callable[[int], int] | None = None  # the minimum over ranks that plan together

    @property
    def on_gpu(self) -> bool:
        """True if plans are made for a GPU."""
        return self.options.device.type == "cuda" or self.hardware is not None

    @property
    def plans(self) -> bool:
        """True if plans are searched for."""
        return self.options.plans or self.hardware is not None

    def cost(self, *, states: int | None = None) -> OptimizerCost:
        """The costs of an optimizer with `states` moments, under the options."""
        return OptimizerCost.of(self.options, states=states, on_gpu=self.on_gpu)

    def rates(self) -> Hardware:
        """The rates of the machine to plan for."""
        if self.hardware is not None:
            return self.hardware
        device, folder = self.options.device, self.options.disk
        if device.type != "cuda":  # nothing is measured for a plan on the CPU
            return (cached(device) if self.options.ranks == 1 else None) or _ASSUMED
        found = self.of_ranks  # includes the disk
        if found is None:
            found = load(device) if folder is None else load_disk(folder).on(load(device))
        return replace(found, locked_bytes=PAGE_LOCKS.limit_bytes)

    def measured_rates(self) -> Hardware | None:
        """The rates of the machine that runs the plan; None: a CPU that has not been measured."""
        device = self.options.device
        return self.rates() if device.type == "cuda" else cached(device)

    def host_budget_bytes(self) -> int | None:
        """Host memory for parameters, gradients, states and offloaded tensors; None: unknown."""
        found = self.host_bytes
        if found is None and self.hardware is not None:
            found = self.hardware.host_bytes
        limit = self.options.host_memory
        return found if limit is None else min(limit, found or limit)

    def disk_budget_bytes(self) -> int | None:
        """Disk space for the model: the user's limit or the free space, of which a rank gets its
        share; None: no disk."""
        folder, limit = self.options.disk, self.options.disk_memory
        if folder is None:
            return None
        if self.hardware is not None and limit is not None and self.disk_bytes is None:
            return limit  # the disk may be another machine's
        free = shutil.disk_usage(folder).free
        if self.disk_bytes is not None:
            free = min(free, self.disk_bytes)
        return free if limit is None else min(limit, free)

    def free_bytes(self) -> int:
        """Device memory that plans may use: the free memory, or all of a given GPU's, less a
        margin."""
        free_bytes = self.hardware.device_bytes if self.hardware is not None else None
        if not free_bytes:
            free_bytes = compat.free_device_bytes(self.options.device)
        return free_bytes - int(min(_MARGIN * free_bytes, _MARGIN_BYTES))
