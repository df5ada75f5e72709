"""Writes the backward graph: each stage's backward, from last to first.

    before: 0F 1F 2F        after: 0F 1F 2F | 2B 1B 0B

Every forward keeps its saved tensors; `recompute` drops some later. The forward returns the *saved
values* that the backward may need, and the backward graph has placeholders with the same names for
those that it needs. If the model changes an input in place and the backward needs its old value,
the input is copied first (`snapshot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Code, Stage
from megacompile.ir.values import tangent_of
from megacompile.passes.edit import add_item, last_item, needed_for, saved_value, set_saved_values


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
        values = [saved_value(new.forward, arg) for arg in args if arg]
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
    return set_saved_values(new, list(dict.fromkeys(names)))


def _boundary(graph: fx.Graph, call: fx.Node, stage: Stage) -> list[str]:
    """The values that any backward of the stage could take: its arguments and its random state.
    With all boundaries saved, a backward for other outputs than those guessed can be built by
    recomputing every stage."""
    metas = call.meta["value"][: stage.result_count]
    if not any(meta.requires_grad for meta in metas):
        return []
    args = ops.arguments(call)[2]
    unread = _unread(stage, [k for k, meta in enumerate(metas) if meta.requires_grad])
    names = [saved_value(graph, arg).name for k, arg in enumerate(args) if k not in unread]
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
    seen = needed_for(outputs[k] for k in results)
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
    with graph.inserting_after(last_item(call)):
        for k in reversed(range(len(saved))):
            add_item(graph, call, results + k, f"s{stage.index}_{k}")


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
        tuple(made.saved[saved_value(made.forward, a).name] if a else None for a in needed),
        tuple(made.saved[s.name] for s in _saved(call, stage)),
        tuple(made.gradients[results[k]] for k in template.tangents),
        (*(made.gradients[n] for n in carried), *groups),
        name=f"b{stage.index}",
    )
    sources = [args[ref.index] for ref in stage.arg_refs(template.gradients)]
    metas = [n.meta.get("value") for n in sources]
    places = list(zip(template.gradients, stage.gradient_places, strict=True))
    for bucket in buckets:  # the metas of its parameters that get a gradient here
        mine = [i for i, place in places if place is not None and place[0] == bucket.key]
        metas.append(tuple(template.primals[i] for i in mine))
    node.meta["value"] = tuple(metas)
    for k, source in enumerate(sources):
        made.gradients[source] = add_item(graph, node, k, f"d{stage.index}_{k}")
    for k, bucket in enumerate(buckets, start=len(sources)):
        name = f"g{bucket.suffix}_{stage.index}"
        made.of_bucket[bucket.key] = add_item(graph, node, k, name)
