"""Splits stages again, so that they save a given share of their saved tensors or run in tiles.

    the plan: kept -> half kept
    before: 1F returns s1_0 s1_1 s1_2        after: 1F returns s1_0, and 1B computes more

This changes the values that a stage's forward returns and its backward takes, so the backward is
written again. A draft's stages get their bundles here too, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megacompile import compat
from megacompile.cost.ops import analysis_of
from megacompile.ir import ops
from megacompile.ir.plan import SavedPart
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, Stage, Template
from megacompile.ir.tensors import planned_of
from megacompile.passes.edit import with_stages
from megacompile.passes.schedule.differentiate import differentiate, forget_saved_tensors
from megacompile.passes.stages.joint import BackwardInputs, split
from megacompile.passes.stages.templates import TemplateCache, next_index, planned_for

Bundles = tuple[tuple[int, ...], ...]  # indices of a template's saved tensors, in order
_SELECTIVE = 0.5  # of saved tensors; on a 7B layer, 4 % more time for half of the memory


def split_stages(
    schedule: Schedule,
    *,
    cache: TemplateCache,
    bundles: Callable[[Template], Bundles] | None = None,
) -> Schedule:
    """Split the stages that the plan keeps in half or runs in tiles. For a draft, `bundles` returns
    the saved tensors of a template that become one value (see `bundles_of`)."""
    plan, templates = schedule.plan, []
    for stage, row in zip(schedule.stages, plan.stages, strict=True):
        halved = row.saved is SavedPart.HALF and stage.traced.has_backward
        fraction = _SELECTIVE if row.saved is SavedPart.HALF else 1.0
        again = row.tiles > 1 or halved
        templates.append(_template_of(stage, fraction, row.tiles, cache) if again else stage.traced)
    together: dict[Template, Bundles] = {}
    if bundles is not None and schedule.backward is not None:
        together = {template: bundles(template) for template in set(templates)}
    on_host = plan.keep & plan.offload
    wanted = [
        (template, () if stage.index in on_host else together.get(template, ()))
        for stage, template in zip(schedule.stages, templates, strict=True)
    ]
    if wanted == [(stage.template, stage.bundles) for stage in schedule.stages]:
        return schedule
    stages = tuple(
        replace(stage, template=template, bundles=each)
        if (stage.template, stage.bundles) != (template, each)
        else stage
        for stage, (template, each) in zip(schedule.stages, wanted, strict=True)
    )
    if schedule.backward is None:
        made = with_stages(replace(schedule, draft=True).fresh(), stages)
    else:
        made = differentiate(with_stages(_undifferentiated(schedule), stages))
    return replace(made, draft=schedule.draft)


def stages_in_tiles(schedule: Schedule, tiles: int, cache: TemplateCache) -> frozenset[int]:
    """The stages with pieces that can run in `tiles` tiles. The others are split as if there were
    no tiles, because recomputing would save nothing there."""
    if tiles == 1:
        return frozenset()
    known = [stage for stage in schedule.stages if stage.traced.symbols is None]
    return frozenset(
        stage.index for stage in known if _template_of(stage, 1.0, tiles, cache).tiles > 1
    )


def _template_of(stage: Stage, saved_fraction: float, tiles: int, cache: TemplateCache) -> Template:
    """The stage's template, split for a saved fraction and a number of tiles; shared by all stages
    with the same template. Without tiles if nothing can be tiled."""
    base = stage.traced
    wanted = (saved_fraction, tiles)
    if wanted == (base.saved_fraction, base.tiles) or base.joint is None:
        return base
    traced = base.traced or base
    key = (traced, *wanted)
    if key not in cache:
        takes = BackwardInputs(base.tangents, base.partial_gradients, base.tangent_metas)
        made = split(
            stage,
            base.joint,
            takes,
            base.gradients,
            index=next_index(cache),
            saved_fraction=saved_fraction,
            tiles=tiles,
        )
        if made.tiles != tiles:
            made = _template_of(stage, saved_fraction, 1, cache)
        cache[key] = made
    return planned_for(cache[key], planned_of(stage.metas), cache)


def _undifferentiated(schedule: Schedule) -> Schedule:
    """Undo `differentiate`: the forward only, as a draft in a new graph."""
    new = replace(schedule, backward=None, saved_values=(), gradients=(), draft=True).fresh()
    graph = new.forward
    calls = ops.calls_by_stage(graph, ops.forward)
    forget_saved_tensors(graph, [(call, new.stages[index]) for index, call in calls.items()])
    outputs, _ = ops.returned(graph)
    compat.set_args(graph.output_node(), ((outputs, ()),))
    for node in ops.nodes_of(graph, ops.save_rng, ops.snapshot):
        graph.erase_node(node)
    return new.fresh()  # a new graph, in which the erased names are free


def bundles_of(template: Template, *, fused: bool) -> Bundles:
    """Group the saved tensors of a template into bundles; () if every tensor stays separate.

        before: 1F returns y1 s1_0 s1_1 ... s1_13        after: 1F returns y1 s1_0

    A draft is only simulated, and most of its nodes would be for saved tensors. Those of a stage
    are created and freed together, so those that own their memory become one value, a *bundle*.
    Tensors that share memory with the stage's inputs or outputs may live longer.
    """
    apart = set(range(len(template.saved)))
    for code in (Code.FORWARD_SAVING, Code.RECOMPUTE):
        returned = analysis_of(template, code, fused=fused).returned
        places = [-1 if each is None else each.memory for each in returned]  # < 0: of an input
        first = len(places) - len(template.saved)
        apart &= {i for i in apart if places[first + i] >= 0}
        apart -= {i for i in apart if places[first + i] in places[:first]}
    if len(apart) < 2:
        return ()
    bundle = tuple(sorted(apart))
    others = [(i,) for i in range(len(template.saved)) if i not in apart]
    return tuple(sorted([bundle, *others]))
