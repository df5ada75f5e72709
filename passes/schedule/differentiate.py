"""Writes the backward graph: each stage's backward, from last to first.

    before: 0F 1F 2F        after: 0F 1F 2F | 2B 1B 0B

Every forward keeps its saved tensors; `recompute` drops some later. The forward returns the *saved
values* that the backward may need, and the backward graph has placeholders with the same names for
those that it needs. If the model changes an input in place and the backward needs its old value,
the input is copied first (`snapshot`).

`split_stages` splits stages again, so that they save a given share of their saved tensors or run in
tiles. This changes the values that a forward returns and its backward takes, so the backward is
written again. A draft's stages get their bundles here too, for the same reason.

    the plan: kept -> half kept
    before: 1F returns s1_0 s1_1 s1_2        after: 1F returns s1_0, and 1B computes more
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.cost.ops import analysis_of
from megacompile.ir import ops
from megacompile.ir.plan import SavedPart
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Code, Stage, Template
from megacompile.ir.tensors import planned_of
from megacompile.ir.values import tangent_of
from megacompile.passes import edit
from megacompile.passes.stages.joint import BackwardInputs, split
from megacompile.passes.stages.templates import TemplateCache, next_index, planned_for

Bundles = tuple[tuple[int, ...], ...]  # indices of a template's saved tensors, in order
_SELECTIVE = 0.5  # of saved tensors; on a 7B layer, 4 % more time for half of the memory


@dataclass
class _Backward:
    """The backward graph of `forward` so far."""

    forward: fx.Graph
    graph: fx.Graph = field(default_factory=fx.Graph)
    saved: dict[str, fx.Node] = field(default_factory=dict)  # placeholders of saved values
    gradients: dict[fx.Node, fx.Node] = field(default_factory=dict)  # of forward values
    of_bucket: dict[int, fx.Node] = field(default_factory=dict)  # gradients, by the bucket's key


def differentiate(schedule: Schedule) -> Schedule:
    """Add a backward graph if `schedule.tangents` requests one."""
    if not any(stage.traced.has_backward for stage in schedule.stages):
        return schedule
    new = schedule.copy()
    calls = ops.calls_by_stage(new.forward, ops.forward)
    stages = [stage for stage in reversed(new.stages) if stage.traced.has_backward]
    made = _Backward(new.forward)
    for stage in stages:
        _save(new.forward, calls[stage.index], stage)
        args = backward_args(calls[stage.index], stage, stage.traced.backward_primals)
        values = [edit.saved_value(new.forward, arg) for arg in args if arg]
        for node in (*values, *_saved(calls[stage.index], stage)):
            if node.name not in made.saved:
                made.saved[node.name] = made.graph.placeholder(node.name)
                made.saved[node.name].meta["value"] = node.meta.get("value")
    outputs, _ = ops.returned(new.forward)
    for k in new.tangents:
        tangent = tangent_of(made.graph, k, f"t{k}")
        tangent.meta["value"] = outputs[k].meta.get("value")
        made.gradients[outputs[k]] = tangent
    for stage in stages:
        _add_backward(made, calls[stage.index], stage)
    wanted = [n for n in new.forward.find_nodes(op="placeholder") if n in made.gradients]
    made.graph.output((tuple(made.gradients[n] for n in wanted), (), ()))
    new = replace(new, backward=made.graph, gradients=tuple(n.name for n in wanted))
    names = [
        *made.saved,
        *(name for s in new.stages for name in _boundary(new.forward, calls[s.index], s)),
    ]
    return edit.set_saved_values(new, list(dict.fromkeys(names)))


def _boundary(graph: fx.Graph, call: fx.Node, stage: Stage) -> list[str]:
    """The values that any backward of the stage could take: its arguments and its random state.
    With all boundaries saved, a backward for outputs other than those guessed can be built by
    recomputing every stage."""
    metas = call.meta["value"][: stage.result_count]
    if not any(meta.requires_grad for meta in metas):
        return []
    args = ops.arguments(call)[2]
    unread = _unread(stage, [k for k, meta in enumerate(metas) if meta.requires_grad])
    names = [edit.saved_value(graph, arg).name for k, arg in enumerate(args) if k not in unread]
    if stage.traced.random:
        with graph.inserting_before(call):
            ops.call(graph, ops.save_rng, stage, name=f"rng{stage.index}")
        names.append(f"rng{stage.index}")
    return names


def _unread(stage: Stage, results: Sequence[int]) -> set[int]:
    """Arguments that a stage changes in place and that no backward of these results can take, such
    as BatchNorm's statistics. Empty for a stage with random numbers, whose recompute runs the whole
    forward."""
    template = stage.traced
    if template.random or Code.FORWARD not in template.graphs:
        return set()
    graph = template.graphs[Code.FORWARD].graph
    outputs: Any = graph.output_node().args[0]
    seen = edit.needed_for(outputs[k] for k in results)
    placeholders = graph.find_nodes(op="placeholder")
    changed = [i for i in stage.mutated if placeholders[i] not in seen]
    found = {ref.index for ref in stage.arg_refs(changed)}
    read = {
        ref.index
        for ref, node in zip(stage.primals, placeholders, strict=True)
        if isinstance(ref, ArgRef) and node in seen
    }
    return found - read


def _save(graph: fx.Graph, call: fx.Node, stage: Stage) -> None:
    """Make a forward return its saved tensors, after its outputs and new values."""
    results = stage.result_count
    compat.set_args(call, (*call.args[:3], True))
    saved = stage.saved_values
    call.meta["value"] = (*call.meta["value"], *saved)
    with graph.inserting_after(edit.last_item(call)):
        for k in reversed(range(len(saved))):
            edit.add_item(graph, call, results + k, f"s{stage.index}_{k}")


def forget_saved_tensors(graph: fx.Graph, calls: Sequence[tuple[fx.Node, Stage]]) -> set[str]:
    """Undo `_save` for some forwards, in place; returns the names of their saved tensors."""
    dropped: dict[fx.Node, None] = {}
    for call, stage in calls:
        results = stage.result_count
        compat.set_args(call, (*call.args[:3], False))
        call.meta["value"] = call.meta["value"][:results]
        dropped |= {item: None for k, item in ops.items(call) if k >= results}
    outputs, kept = ops.returned(graph)
    kept = tuple(n for n in kept if n not in dropped)  # one replacement: the list is long
    compat.set_args(graph.output_node(), ((outputs, kept),))
    for item in dropped:
        graph.erase_node(item)
    return {item.name for item in dropped}


def _saved(call: fx.Node, stage: Stage) -> list[fx.Node]:
    return [item for k, item in sorted(ops.items(call)) if k >= stage.result_count]


def backward_args(call: fx.Node, stage: Stage, primals: tuple[int, ...]) -> list[fx.Node | None]:
    """The arguments of a stage's forward, with None for those not in `primals`."""
    wanted = {ref.index for ref in stage.arg_refs(primals)}
    args = ops.arguments(call)[2]
    return [arg if i in wanted else None for i, arg in enumerate(args)]


def _add_backward(made: _Backward, call: fx.Node, stage: Stage) -> None:
    template, graph = stage.traced, made.graph
    args = ops.arguments(call)[2]
    results = dict(ops.items(call))
    buckets = stage.gradient_buckets
    carried = [args[ref.index] for ref in stage.arg_refs(template.partial_gradients)]
    groups = [made.of_bucket[b.key] for b in buckets if b.key in made.of_bucket]
    needed = backward_args(call, stage, template.backward_primals)
    node = ops.call(
        graph,
        ops.backward,
        stage,
        (),
        tuple(made.saved[edit.saved_value(made.forward, a).name] if a else None for a in needed),
        tuple(made.saved[s.name] for s in _saved(call, stage)),
        tuple(made.gradients[results[k]] for k in template.tangents),
        (*(made.gradients[n] for n in carried), *groups),
        name=f"b{stage.index}",
    )
    sources = [args[ref.index] for ref in stage.arg_refs(template.gradients)]
    metas = [n.meta.get("value") for n in sources]
    places = list(zip(template.gradients, stage.gradient_places, strict=True))
    for bucket in buckets:  # metas of its parameters with a gradient here
        mine = [i for i, place in places if place is not None and place[0] == bucket.key]
        metas.append(tuple(template.primals[i] for i in mine))
    node.meta["value"] = tuple(metas)
    for k, source in enumerate(sources):
        made.gradients[source] = edit.add_item(graph, node, k, f"d{stage.index}_{k}")
    for k, bucket in enumerate(buckets, start=len(sources)):
        name = f"g{bucket.suffix}_{stage.index}"
        made.of_bucket[bucket.key] = edit.add_item(graph, node, k, name)


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
        made = edit.with_stages(replace(schedule, draft=True).fresh(), stages)
    else:
        made = differentiate(edit.with_stages(_undifferentiated(schedule), stages))
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
