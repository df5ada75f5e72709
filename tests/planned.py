"""Schedules that the product's own pipeline makes of a line of actions: nothing is captured.

    planned("0F 1F 2F", accumulate=True, lookahead=1, resident=frozenset({0}))

Options are those of `megacompile()`, of the variant of a graph, of the choice of a plan
(`megacompile.plan.choice`), and of the stubs that the line is parsed to (`tests.actions`).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from megacompile.ir.capture import Variant
from megacompile.ir.schedule import Schedule
from megacompile.mesh_options import PlannedMesh
from megacompile.options import Lowering, Options
from megacompile.plan import pipeline
from megacompile.plan.choice import Choice
from megacompile.plan.setting import Setting
from tests.actions import Stubs, parse

# The passes by name, as they are called there.
PASSES: Any = pipeline
_OPTIONS = Options.resolve(device="cpu", lowering="eager", progress=False)


def planned(line: str, *, training: bool = True, inductor: bool = False, **given: Any) -> Schedule:
    """The schedule of a line of forwards, behind every pass but `lower`.

    Args:
        training: with a backward and an update.
        inductor: with what is only made where Inductor compiles: norms, updates on the device.
    """
    ranks, replicas = given.get("ranks", 1), given.get("replicas", 1)
    mesh = PlannedMesh(ranks, replicas) if ranks > 1 else None
    taken = {kind: _of(kind, given) for kind in (Stubs, Choice, Variant)}
    rest = {
        name: value for name, value in given.items() if not any(name in t for t in taken.values())
    }
    lowering = Lowering.INDUCTOR if inductor else Lowering.EAGER
    options = replace(_OPTIONS, mesh=mesh, lowering=lowering, **rest)
    schedule = parse(line, **taken[Stubs])
    if not training:
        schedule = replace(schedule, tangents=())
    variant = Variant(schedule.tangents, **{"keep_last": True, **taken[Variant]})
    passes = pipeline.Pipeline(Setting(options), ())
    return passes.planned(PASSES.differentiate(schedule), variant, Choice(**taken[Choice]))


def _of(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in given.items() if name in names}
