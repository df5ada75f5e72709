"""Schedules that the product's own pipeline makes of a line of actions: nothing is captured.

    planned("0F 1F 2F", accumulate=True, lookahead=1, resident=frozenset({0}))

Options are those of `megacompile()`, of the variant of a graph, of the choice of a plan and of
where buckets live (`megacompile.ir.plan`), and of the stubs that the line is parsed to
(`tests.actions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.cost.hardware import H200, Hardware
from megacompile.ir import ops
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice, Places, Plan, SavedPart, StagePlan, Tier, Updater
from megacompile.ir.schedule import Schedule
from megacompile.options import Activations, Lowering, Options, PlannedMesh
from megacompile.passes.stages.templates import TemplateCache
from megacompile.plan import pipeline
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
from tests.actions import Stubs, parse
from tests.zoo import Tower

EVERYTHING: dict[str, Any] = {  # of `built`
    "stages": 5,
    "slots": 3,
    "accumulate": True,
    "reads": {4: "4 0"},
    "reuse": True,
    "random": {1},
    "keep": {2},
    "changes": {1, 3},
}
_SHARED: dict[str, Any] = {"reads": {3: "3 0"}}
_STEPPING: dict[str, Any] = {"device_update": {0}, "resident": {3}, "helps": True}
SPECS: dict[str, dict[str, Any]] = {  # others; `verify` says nothing of them
    "plain": {},
    "two stages": {"stages": 2},
    "adding": {"accumulate": True},
    "shared": _SHARED,
    "holding": {"reuse": True},
    "random": {"random": {1, 2}},
    "keeping": {"keep": {2}},
    "changing": {"changes": {1}},
    "inference": {"training": False},
    "two stages, inference": {"stages": 2, "training": False},
    "norms": {"inductor": True},
    "updating": {"update": True},
    "updating, masters": {"update": True, "compute_dtype": torch.bfloat16},
    "updating, adding": {"update": True, "accumulate": True},
    "offloading": {"offload": {1, 2}},
    "kept there": {"offload": {1, 2}, "keep": {1, 2}},
    "stepping": _STEPPING,
    "stepping, two on the device": {**_STEPPING, "device_update": {0, 1}},
    "shared, on the device": {**_SHARED, "device_update": {0}},
}
_PLACES = ("resident", "on_disk", "weights_on_disk")

# The passes by name, as they are called there.
PASSES: Any = pipeline
_OPTIONS = Options.resolve(device="cpu", lowering="eager", progress=False)


def planned(line: str, *, training: bool = True, **given: Any) -> Schedule:
    """The schedule of a line of forwards, behind every pass but `lower`.

    Args:
        training: with a backward and an update.
        given: as for `passed`; `still` are stages that give no gradients of parameters.
    """
    schedule = without_gradients(parse(line, **_of(Stubs, given)), given.get("still", ()))
    for code in (g.graph for t in schedule.templates for g in t.graphs.values()):
        if not list(code.nodes):
            code.output(())  # what computes nothing takes no time, either
    schedule = PASSES.differentiate(schedule) if training else replace(schedule, tangents=())
    return passed(schedule, **given)


def passed(
    schedule: Schedule,
    *,
    inductor: bool = False,
    helps: bool = False,
    plan: Plan | None = None,
    rank: int = 0,
    templates: TemplateCache | None = None,
    **given: Any,
) -> Schedule:
    """A differentiated schedule, behind every other pass but `lower`.

    Args:
        inductor: with what is only made where Inductor compiles: norms, updates on the device.
        helps: the device helps the host with its updates.
        plan: instead of the one that the passes make.
        given: options.
    """
    ranks, replicas = given.get("ranks", 1), given.get("replicas", 1)
    taken = {kind: _of(kind, given) for kind in (Stubs, Choice, Variant)}
    known = {"still": (), **dict.fromkeys(_PLACES)}
    known |= {k: v for kind in taken.values() for k, v in kind.items()}
    rest = {name: value for name, value in given.items() if name not in known}
    if "activations" in rest:
        rest["activations"] = Activations(rest["activations"])
    options = replace(
        _OPTIONS,
        mesh=Mesh((replicas, ranks), rank) if ranks * replicas > 1 else None,
        lowering=Lowering.INDUCTOR if inductor or helps else Lowering.EAGER,
        **rest,
    )
    variant = Variant(schedule.tangents, **{"keep_last": True, **taken[Variant]})
    places = Places.of(*(given.get(name, ()) for name in _PLACES))
    choice = Choice(places=places, **taken[Choice])
    setting = Setting(options, hardware=H200 if helps else None)
    passes = pipeline.Pipeline(setting, (), templates)
    made = passes.with_plan(schedule, variant, choice)
    made = made if plan is None else replace(made, plan=plan)
    return passes.moving(passes.saving(made), variant, choice)


@dataclass(frozen=True)
class Mesh(PlannedMesh):
    """Of one of the ranks that share a model."""

    rank: int = 0

    def get_local_rank(self, dim: int = 0) -> int:
        return self.rank


def built(
    stages: int = 4,
    *,
    keep: Collection[int] = (),
    offload: Collection[int] = (),
    resident: Collection[int] = (),
    device_update: Collection[int] = (),
    slots: int = 2,
    **given: Any,
) -> Schedule:
    """A chain of stages with the plan of `rows`, each of which saves two tensors; else as
    `planned`."""
    buckets = {"resident": resident, "device_update": device_update}
    plan = rows(stages, keep, offload=offload, **buckets)
    line = " ".join(f"{i}F" for i in range(stages))
    given = {"saved": 2, "inductor": bool(device_update), **given}
    return planned(line, plan=plan, lookahead=slots - 1, slots=slots, **given)


def rows(
    stages: int,
    keep: Collection[int] = (),
    *,
    offload: Collection[int] = (),
    rerun: Collection[int] = (),
    **others: Any,
) -> Plan:
    """A plan of so many stages: those whose saved tensors are kept, wait on the host, and that run
    again; and of the buckets, as `Places.of` takes them."""
    places = {name: others.pop(name) for name in _PLACES if name in others}
    updated = others.pop("device_update", ())
    return Plan(
        Places.of(**places).changed(updated, updater=Updater.DEVICE),
        tuple(
            StagePlan(
                saved=SavedPart.ALL if i in keep else SavedPart.INPUTS,
                tier=Tier.HOST if i in offload else Tier.DEVICE,
                rerun=i in rerun,
            )
            for i in range(stages)
        ),
        **others,
    )


def without_gradients(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """A schedule some of whose stages give no gradients of parameters: these are frozen, there."""
    changed = tuple(
        replace(stage, template=replace(stage.traced, gradients=stage.traced.gradients[-1:]))
        if stage.index in stages
        else stage
        for stage in schedule.stages
    )
    for graph in schedule.graphs.values() if stages else ():
        for node in ops.nodes_of(graph, ops.forward, ops.recompute, ops.backward):
            stage, *rest = ops.arguments(node)
            node.args = (changed[stage.index], *rest)
            if node.target is ops.backward and stage.index in stages:
                for k, group in list(ops.items(node)):
                    if k > 0:
                        graph.erase_node(group)
    return replace(schedule, stages=changed) if stages else schedule


def _of(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in given.items() if name in names}


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


def captured(
    model: nn.Module,
    *shape: int,
    in_backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    hardware: Hardware = H200,
    disk: dict[str, Any] | None = None,
    **options: Any,
) -> list[AbstractProgram]:
    """The captured graphs of a model on meta that gets one tensor of that shape; `disk` are options
    of a disk of 100 GiB."""
    model = model.to("meta", dtype)
    if in_backward:
        options["optimizer"] = torch.optim.AdamW(model.parameters())
    x = torch.empty(*shape, device="meta", dtype=dtype)
    resolved = abstract_options(device="cpu", **options)
    if disk is not None:
        resolved = replace(resolved, disk="/absent", disk_memory=100 * GIB, **disk)
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
    options |= {"disk": {"disk_weights": True}} if disk_weights else {}
    model = Uneven((nn.Linear(2048, 2048) for _ in range(16)), 8)
    return captured(model, 4096, 2048, hardware=DISK, **options)[0]


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
