"""Machines whose host memory is short, a disk, 8-bit states, the update in the backward: cases of
`python -m benchmarks.plans --cases tiers`.

The models are those of `benchmarks.cases` and `benchmarks.models`, in bf16 with AdamW; tokens are
16x1024 unless a case says otherwise. A disk reads and writes 2.2 GB/s, half of it each where both
run, and has 2 TiB.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.models import SHAPE_14B, SHAPE_32B, SHAPE_72B, SHAPE_120B, Loss, qwen2
from megacompile.cost.hardware import Hardware
from megacompile.cost.rates import DiskRates, known
from megacompile.errors import DeviceMemoryError, HostMemoryError
from megacompile.options import Options
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.scenario import Scenario

GIB = 2**30
_DISK = DiskRates(2.2, 2.2, 1.1, 1.1)
_DISK_BYTES = 2 * 2**40


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the machine that it is planned for."""

    model: str  # "7.6 B"
    layers: int
    host_gib: int
    shape: Mapping[str, int] = field(default_factory=dict)  # of `qwen2()`, beside its layers
    batch: int = 16
    length: int = 1024
    gpu: str = "h200"
    device_gib: int | None = None  # that may be used; None: the GPU's, less 5 %
    link_gb_s: float | None = None  # None: the GPU's
    state_dtype: torch.dtype | str = torch.float32
    in_backward: bool = False
    disk: bool = False

    @property
    def name(self) -> str:
        """ "7.6 B, 64x1024, exact, float32; h200, 40 GiB host, disk"."""
        mode = "in the backward" if self.in_backward else "exact"
        states = "8-bit" if self.state_dtype == "int8" else str(self.state_dtype)[6:]
        machine = [self.gpu if self.device_gib is None else f"{self.gpu} {self.device_gib} GiB"]
        machine += [f"{self.link_gb_s:g} GB/s"] if self.link_gb_s is not None else []
        machine += [f"{self.host_gib} GiB host", *(["disk"] if self.disk else [])]
        return f"{self.model}, {self.batch}x{self.length}, {mode}, {states}; {', '.join(machine)}"

    def hardware(self) -> Hardware:
        """The machine."""
        machine = known(self.gpu).replace(host_bytes=self.host_gib * GIB)
        if self.link_gb_s is not None:
            machine = machine.with_link(self.link_gb_s)
        return _DISK.on(machine) if self.disk else machine

    def module(self) -> torch.nn.Module:
        """The model, on meta, with its loss."""
        return Loss(qwen2(self.layers, device="meta", dtype=torch.bfloat16, **self.shape))

    def options(self, module: torch.nn.Module) -> Options:
        """The options that `megacompile()` would get."""
        optimizer = torch.optim.AdamW(module.parameters()) if self.in_backward else None
        options = abstract_options(
            gpu_memory=None if self.device_gib is None else self.device_gib * GIB,
            state_dtype=self.state_dtype,
            optimizer=optimizer,
        )
        if not self.disk:
            return options
        return replace(options, disk=str(Path("/")), disk_memory=_DISK_BYTES)


def row(case: Case) -> dict[str, object]:
    """The plan of a case: the step that is predicted, None where nothing fits; what lies where; and
    the seconds of the processor that the capture took, and the search with the schedule."""
    start = time.process_time()
    module, hardware = case.module(), case.hardware()
    ids = torch.empty(case.batch, case.length, dtype=torch.int64, device="meta")
    options = case.options(module)
    programs = abstract_programs(module, (ids,), options=options, hardware=hardware)
    captured = time.process_time()
    found = _planned(programs, hardware)
    searched = time.process_time()
    times = {"capture_s": round(captured - start, 1), "search_s": round(searched - captured, 1)}
    return {**found, **times}


def _planned(programs: list[AbstractProgram], hardware: Hardware) -> dict[str, object]:
    compiler = programs[0].compiler
    try:
        schedules = tuple(program.schedule() for program in programs)
    except (DeviceMemoryError, HostMemoryError):
        return {"step_s": None}
    now = Scenario(
        schedules,
        hardware,
        compiler.setting.cost(states=2),
        device_bytes=compiler.budget.size_bytes(),
        host_bytes=hardware.host_bytes,
        disk_bytes=compiler.budget.disk_bytes(),
    )
    plan = schedules[-1].plan
    return {
        "step_s": round(now.timeline().step_s, 4),
        "kept": len(plan.keep),
        "resident": len(plan.resident),
        "on disk": len(plan.on_disk),
        "tiles": max((row.tiles for row in plan.stages), default=1),
    }


def _small(gpu: str, device_gib: int, link_gb_s: float, host_gib: int, **other: object) -> Case:
    """7.6 B with 8-bit states on a card with little memory and a slow link."""
    return Case(
        "7.6 B",
        28,
        host_gib,
        gpu=gpu,
        device_gib=device_gib,
        link_gb_s=link_gb_s,
        state_dtype="int8",
        **other,  # type: ignore[arg-type]
    )


TIERS = (
    Case("7.6 B", 28, 40, disk=True),
    Case("7.6 B", 28, 40, disk=True, batch=64),
    Case("7.6 B", 28, 24, disk=True, state_dtype="int8", in_backward=True),
    Case("7.6 B", 28, 118, batch=1, length=131072, state_dtype="int8", in_backward=True),
    Case("14.8 B", 48, 125, SHAPE_14B),
    Case("14.8 B", 48, 125, SHAPE_14B, in_backward=True),
    Case("32.8 B", 64, 125, SHAPE_32B, state_dtype="int8"),
    Case("32.8 B", 64, 125, SHAPE_32B, state_dtype="int8", in_backward=True),
    Case("32.8 B", 64, 125, SHAPE_32B, state_dtype="int8", in_backward=True, batch=64),
    Case("32.8 B", 64, 125, SHAPE_32B, disk=True),
    Case("62.2 B", 68, 118, SHAPE_72B, batch=64, state_dtype="int8", in_backward=True, disk=True),
    Case("62.2 B", 68, 118, SHAPE_72B, state_dtype="int8", in_backward=True, disk=True),
    Case("120 B", 88, 503, SHAPE_120B, state_dtype="int8", in_backward=True),
    Case("120 B", 88, 503, SHAPE_120B, state_dtype="int8", disk=True),
    _small("4090", 22, 25.0, 64),
    _small("4090", 22, 25.0, 48, in_backward=True),
    _small("4090", 22, 25.0, 32, in_backward=True, disk=True),
    _small("4090", 15, 12.0, 64, batch=4),
    _small("4090", 15, 12.0, 48, batch=4, in_backward=True),
    _small("3080", 9, 25.0, 64, batch=4),
    _small("3080", 9, 12.0, 48, batch=4, in_backward=True),
    _small("3080", 9, 12.0, 32, batch=4, in_backward=True, disk=True),
)
