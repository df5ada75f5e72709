"""Recovers from an out-of-memory error on the device: repeats the step with a smaller plan.

The repeated step must return the same results: random generators are reset. If the forward has
already changed something in place (a BatchNorm statistic), an error is raised instead.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megacompile import compat, notices
from megacompile.errors import DeviceMemoryError
from megacompile.runtime.ops.compute import Random, random_state, set_random_state
from megacompile.runtime.ops.machine import Machine


class StepsDown(Protocol):
    """The planner."""

    def step_down(self) -> str:
        """Make smaller plans from now on; returns how, or "" if nothing is left to free."""

    def needs(self) -> str:
        """Device memory of the smallest feasible plan, as a table; "" if not known."""


def step_down(compiler: StepsDown, machine: Machine, ran_out: str, where: str) -> None:
    """Plan with less memory, free the old plan's slots and all CUDA graphs, and log it.

    Raises:
        DeviceMemoryError: nothing is left to free.
    """
    machine.slots.forget()
    machine.forget_graphs()
    gc.collect()
    torch.cuda.empty_cache()
    how = compiler.step_down()
    if not how:
        needs = compiler.needs()
        raise DeviceMemoryError(
            f"megacompile(): device memory ran out in {where}, with every stage recomputed and "
            f"nothing resident ({ran_out})\n{needs}{'' if not needs else chr(10)}"
            'use smaller batches or sequences, or activations="offload"'
        )
    notices.warn(
        f"megacompile: device memory ran out in {where}, which is repeated with a smaller plan: "
        f"{how} ({ran_out})",
        notices.Whose.RANK,
    )


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """The state that a forward may change, recorded before it."""

    device: torch.device
    random: Random
    versions: tuple[int, ...]  # versions of the buffers
    assigned: int  # changes by schedules: a BatchNorm statistic's version does not change

    @staticmethod
    def of(modules: Iterable[nn.Module], machine: Machine) -> StepSnapshot:
        """Record the current state of all modules of a model."""
        device = machine.device
        return StepSnapshot(device, random_state(device), _versions(modules), machine.assigned)

    def restore(self, model: nn.Module, machine: Machine, ran_out: str) -> None:
        """Reset the random generators.

        Raises:
            DeviceMemoryError: the forward has changed a buffer.
        """
        now = _versions(compat.modules_of(model)), machine.assigned
        if now != (self.versions, self.assigned):
            raise DeviceMemoryError(
                f"megacompile(): device memory ran out in the forward ({ran_out}), which has "
                "changed a buffer (running statistics?) and cannot be repeated; set a smaller "
                "budget: megacompile(model, gpu_memory=...)"
            )
        set_random_state(self.device, self.random)


def _versions(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    buffers = compat.holders_of_buffers(modules)
    return tuple(compat.version(b) for held in buffers for b in held.values() if b is not None)


def first_line(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0]
