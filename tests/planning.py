"""Towers of layers to plan on a machine that is not there. Each is captured once a process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.cost.hardware import H200, Hardware
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.problem import Problem
from tests.zoo import Tower

MIB, GIB = 2**20, 2**30
MODES = [(False, torch.float32), (True, torch.float32), (False, "int8"), (True, "int8")]


def with_drive(each: float, both: float | None = None) -> Hardware:
    """An H200 and a drive that reads and writes so many GB/s, alone and beside one another."""
    both = each if both is None else both
    return H200.replace(
        disk_read_gb_s=each,
        disk_write_gb_s=each,
        disk_read_both_gb_s=both,
        disk_write_both_gb_s=both,
    )


DISK = with_drive(3.0, both=2.0)


def equal_layers(depth: int = 12, width: int = 4096) -> Tower:
    """Layers of one size, large enough for memory to matter."""
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    return Tower(layers, lambda layer, x: x + layer(x))


class Uneven(nn.Module):
    """Layers behind a first one of another width, which is by far the largest."""

    def __init__(self, layers: Iterable[nn.Module], factor: int, width: int = 2048) -> None:
        super().__init__()
        self.first = nn.Linear(width, factor * width)
        self.second = nn.Linear(factor * width, width)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def of_sizes(*sizes: int, width: int = 2048) -> Uneven:
    layers = (nn.Sequential(nn.Linear(width, n), nn.Linear(n, width)) for n in sizes)
    return Uneven(layers, 4, width)


def equal_behind(layers: int = 16, width: int = 2048) -> Uneven:
    return Uneven((nn.Linear(width, width) for _ in range(layers)), 8, width)


def captured(
    model: nn.Module,
    *shape: int,
    in_backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    hardware: Hardware = H200,
    **options: Any,
) -> list[AbstractProgram]:
    """The captured graphs of a model on meta that gets one tensor of that shape."""
    model = model.to("meta", dtype)
    if in_backward:
        options["optimizer"] = torch.optim.AdamW(model.parameters())
    x = torch.empty(*shape, device="meta", dtype=dtype)
    resolved = abstract_options(device="cpu", **options)
    return abstract_programs(model, (x,), options=resolved, hardware=hardware)


def problem_of(made: AbstractProgram, **changes: Any) -> Problem:
    """What its compiler seeks a plan for; `changes` are other fields of it."""
    planned, compiler = made.planned(), made.compiler
    graphs = compiler.pipeline.differentiated(*planned)
    return replace(compiler.chooser.problem(graphs, planned.variant), **changes)


@cache
def tower(tokens: int = 16384, *, in_backward: bool = False) -> AbstractProgram:
    options: dict[str, Any] = {"in_backward": in_backward, "state_dtype": torch.float32}
    return captured(equal_layers(), tokens, 4096, **options)[0]


def problem(budget_bytes: int, tokens: int = 16384, *, in_backward: bool = False) -> Problem:
    """That tower, with so much device memory. Nothing is known of it that another one has found."""
    made = tower(tokens, in_backward=in_backward)
    return problem_of(made, budget_bytes=budget_bytes)


@cache
def uneven() -> AbstractProgram:
    """Eight layers of two sizes, behind two large ones."""
    return captured(of_sizes(*([2048, 4096] * 4)), 4096, 2048, state_dtype=torch.float32)[0]


def uneven_problem(**changes: Any) -> Problem:
    return problem_of(uneven(), budget_bytes=4 * GIB, **changes)


@cache
def wide(
    in_backward: bool = False, state_dtype: Any = torch.float32, disk_weights: bool = False
) -> AbstractProgram:
    """Sixteen equal layers behind a large one, on a machine with a drive."""
    options: dict[str, Any] = {"in_backward": in_backward, "state_dtype": state_dtype}
    (made,) = captured(equal_behind(), 4096, 2048, hardware=DISK, **options)
    if not disk_weights:
        return made
    stored: dict[str, Any] = {"disk": "/absent", "disk_memory": 100 * GIB, "disk_weights": True}
    given = replace(made.compiler.setting.options, **stored)
    x = torch.empty(4096, 2048, device="meta", dtype=torch.bfloat16)
    model = equal_behind().to("meta", torch.bfloat16)
    if in_backward:
        given = replace(given, optimizer=torch.optim.AdamW(model.parameters()))
    return abstract_programs(model, (x,), options=given, hardware=DISK)[0]


def wide_problem(
    in_backward: bool = False,
    state_dtype: Any = torch.float32,
    *,
    disk_weights: bool = False,
    **changes: Any,
) -> Problem:
    """The same, with 2 GiB of device memory and a disk of 100 GiB."""
    made = wide(in_backward, state_dtype, disk_weights)
    given: dict[str, Any] = {
        "budget_bytes": 2 * GIB,
        "hardware": DISK,
        "disk_budget_bytes": 100 * GIB,
    }
    return problem_of(made, **{**given, **changes})
