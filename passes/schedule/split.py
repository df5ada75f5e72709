"""Split stages again, so that they save a given share of what they would save, or run in tiles.

    the plan: kept -> half kept
    before: 1F returns s1_0 s1_1 s1_2        after: 1F returns s1_0, and 1B computes more

The plan is made when sizes are known, so a stage has been split for speed by then. A stage that is
to save less, or to run in tiles, is split again, from the traced graph that is at
hand. How much it saves changes what its forward returns and its backward takes, so the backward is
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
from megacompile.passes.edit import with_stages
from megacompile.passes.schedule.differentiate import differentiate, forget_saved_tensors
from megacompile.passes.stages.joint import BackwardInputs, runs_by_samples, split
from megacompile.passes.stages.numbers import numbers_of
from megacompile.passes.stages.templates import (
    TemplateCache,
    next_index,
    planned_for,
)

Bundles = tuple[tuple[int, ...], ...]  # places among a template's saved tensors, in order
_SELECTIVE = 0.5  # of the saved tensors of a 7B layer: 4 % of its time for half of the memory


def split_stages(
    schedule: Schedule,
    *,
    cache: TemplateCache,
    bundles: Callable[[Template], Bundles] | None = None,
) -> Schedule:
    """The schedule in which every stage that the plan keeps in half saves no more than that, and
    every one that it runs in tiles runs in so many.

    Args:
        bundles: for a draft: which saved tensors of a template are one value (see `bundles_of`).
    """
    plan, templates = schedule.plan, _templates(schedule, cache)
    together: dict[Template, Bundles] = {}
    if bundles is not None and schedule.backward is not None:
        together = {template: bundles(template) for template in set(templates)}
    on_host = plan.keep & plan.offload
    stages = tuple(
        _with(stage, template, () if stage.index in on_host else together.get(template, ()))
        for stage, template in zip(schedule.stages, templates, strict=True)
    )
    if all(new is old for new, old in zip(stages, schedule.stages, strict=True)):
        return schedule
    if schedule.backward is None:
        made = with_stages(replace(schedule, draft=True).fresh(), stages)
    else:
        made = differentiate(with_stages(_undifferentiated(schedule), stages))
    return replace(made, draft=schedule.draft)


def stages_in_tiles(schedule: Schedule, tiles: int, cache: TemplateCache) -> frozenset[int]:
    """The stages that have something to run in so many tiles.

    The others are split as without tiles: to compute again what tiles compute saves nothing there.
    """
    if tiles == 1:
        return frozenset()
    known = [stage for stage in schedule.stages if stage.traced.symbols is None]
    return frozenset(stage.index for stage in known if _within(stage, 1.0, tiles, cache).tiles > 1)


def stages_by_samples(
    schedule: Schedule, cut: frozenset[int], tiles: int, cache: TemplateCache
) -> frozenset[int]:
    """Those of `stages_in_tiles` of which nothing that matters stays outside of tiles.

    Tiles of a stage with attention are of whole samples then; those of others may be of tokens.
    """
    return frozenset(
        index
        for index in cut
        if _within(schedule.stages[index], 1.0, tiles, cache, samples=True).samples
    )


def _templates(schedule: Schedule, cache: TemplateCache) -> list[Template]:
    """That of each stage, as the plan wants it."""
    found = []
    for stage, row in zip(schedule.stages, schedule.plan.stages, strict=True):
        halved = row.saved is SavedPart.HALF and stage.traced.has_backward
        if row.tiles == 1 and not halved:
            found.append(stage.traced)
            continue
        fraction = _SELECTIVE if row.saved is SavedPart.HALF else 1.0
        found.append(_within(stage, fraction, row.tiles, cache, samples=row.samples))
    return found


def _with(stage: Stage, template: Template, bundles: Bundles) -> Stage:
    """The stage with this template and these bundles; itself where it has them."""
    if (stage.template, stage.bundles) == (template, bundles):
        return stage
    return replace(stage, template=template, bundles=bundles)


def _within(
    stage: Stage,
    saved_fraction: float,
    tiles: int,
    cache: TemplateCache,
    *,
    samples: bool = False,
) -> Template:
    """The stage's template, split to save so much and to run in so many tiles; one for all stages
    that share the template. Where not all is cut along samples, the one in tiles of tokens; where
    nothing is cut, the one without tiles."""
    base = stage.traced
    samples = samples and runs_by_samples(stage)
    wanted = (saved_fraction, tiles, samples)
    if wanted == (base.saved_fraction, base.tiles, base.samples) or base.joint is None:
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
            written=base.written,
            saved_fraction=saved_fraction,
            tiles=tiles,
            samples=samples,
        )
        if made.tiles != tiles:
            made = _within(stage, saved_fraction, tiles if samples else 1, cache)
        cache[key] = made
    return planned_for(cache[key], numbers_of(stage.metas), cache)


def _undifferentiated(schedule: Schedule) -> Schedule:
    """The forward alone, as it was before `differentiate`: a draft, in a graph of its own."""
    new = replace(schedule, backward=None, saved_values=(), gradients=(), draft=True).fresh()
    graph = new.forward
    calls = ops.calls_by_stage(graph, ops.forward)
    forget_saved_tensors(graph, [(call, new.stages[index]) for index, call in calls.items()])
    outputs, _ = ops.returned(graph)
    compat.set_args(graph.output_node(), ((outputs, ()),))
    for node in ops.nodes_of(graph, ops.save_rng, ops.snapshot):
        graph.erase_node(node)
    return new.fresh()  # in a graph of its own, the names of what was erased are free


# Bundles of saved tensors, in drafts.


def bundles_of(template: Template, *, fused: bool) -> Bundles:
    """The saved tensors of a template as values, those together that are one; () where each is
    one.

        before: 1F returns y1 s1_0 s1_1 ... s1_13        after: 1F returns y1 s1_0

    A draft is only simulated, and most of its nodes were saved tensors: a layer saves a dozen, each
    with a node for itself, for its placeholder and for its end. All of a stage are made together
    and die together. So those with memory of their own are one value there, a *bundle*, of their
    sizes together. Not one of them is what is in the memory of an input or an output of the stage,
    which may live longer, nor what waits on the host: it is copied tensor by tensor.

    Args:
        fused: elementwise operations are fused (lowering "inductor").
    """
    apart = set(range(len(template.saved)))
    for code in (Code.FORWARD_SAVING, Code.RECOMPUTE):
        apart &= _with_own_memory(template, code, fused)
    if len(apart) < 2:
        return ()
    bundle = tuple(sorted(apart))
    others = [(i,) for i in range(len(template.saved)) if i not in apart]
    return tuple(sorted([bundle, *others]))


def _with_own_memory(template: Template, code: Code, fused: bool) -> set[int]:
    """The saved tensors that share no memory with what else a piece of the template is given or
    returns."""
    returned = analysis_of(template, code, fused=fused).returned
    first = len(returned) - len(template.saved)
    places = [None if each is None else each.memory for each in returned]
    others = set(places[:first])
    return {
        i
        for i, memory in enumerate(places[first:])
        if memory is not None and memory >= 0 and memory not in others
    }
