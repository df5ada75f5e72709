"""Run a stage's forward again in the backward instead of keeping its saved tensors.

    before: 0F 1F 2F | 2B 1B 0B        after: 0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B

A stage that draws random numbers has the generators' state of its forward set again for its
recompute, so that both draw the same.
"""

from __future__ import annotations

from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.passes.edit import add_item, add_saved_values, saved_value
from megacompile.passes.schedule.differentiate import backward_args


def insert_recompute(schedule: Schedule) -> Schedule:
    """The schedule in which every stage that the plan does not keep is recomputed."""
    if schedule.backward is None:
        return schedule
    new = schedule.copy()
    assert new.backward is not None
    forwards = ops.calls_by_stage(new.forward, ops.forward)
    backwards = ops.calls_by_stage(new.backward, ops.backward)
    saved_values = list(new.saved_values)
    for stage in reversed(new.stages):
        if stage.index in backwards and stage.index not in new.plan.keep:
            call = forwards[stage.index]
            dropped = _forget(new.forward, call, stage)
            saved_values = [name for name in saved_values if name not in dropped]
            if stage.traced.saved:
                saved_values += _recompute(new, call, backwards[stage.index], stage)
    return add_saved_values(new, list(dict.fromkeys(saved_values)))


def _forget(graph: fx.Graph, call: fx.Node, stage: Stage) -> set[str]:
    """Stop a forward from returning saved tensors; gives the names they had."""
    results = len(stage.outputs) + len(stage.mutated)
    call.args = (*call.args[:3], False)
    call.meta["value"] = call.meta["value"][:results]
    dropped = [item for k, item in ops.items(call) if k >= results]
    output = graph.output_node()
    outputs, kept = ops.returned(graph)
    output.args = ((outputs, tuple(n for n in kept if n not in dropped)),)
    for item in dropped:
        graph.erase_node(item)
    return {item.name for item in dropped}


def _recompute(new: Schedule, call: fx.Node, backward: fx.Node, stage: Stage) -> list[str]:
    """Insert a recompute before a backward; gives the saved values it takes."""
    graph = new.backward
    assert graph is not None
    args: list[fx.Node | None] = []
    taken: list[str] = []
    for arg in backward_args(call, stage, stage.traced.recompute_primals):
        if arg is None:
            args.append(None)
            continue
        source = saved_value(new.forward, arg)
        taken.append(source.name)
        args.append(_placeholder(graph, source))
    rng = None
    if stage.traced.random:
        taken.append(f"rng{stage.index}")
        state = next(n for n in new.forward.nodes if n.name == taken[-1])
        rng = _placeholder(graph, state)
    placeholders = ops.arguments(backward)[3]
    with graph.inserting_before(backward):
        name = f"rc{stage.index}"
        again = ops.call(graph, ops.recompute, stage, (), tuple(args), rng, name=name)
        again.meta["value"] = stage.traced.saved
        for k, placeholder in enumerate(placeholders):
            item = add_item(graph, again, k, f"{placeholder.name}_again")
            placeholder.replace_all_uses_with(item)
            graph.erase_node(placeholder)
    return taken


def _placeholder(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """The backward's placeholder for a saved value, made where there is none; those come first."""
    existing: list[fx.Node] = graph.find_nodes(op="placeholder")
    for node in existing:
        if node.name == source.name:
            return node
    with graph.inserting_before(existing[0]):
        placeholder = graph.placeholder(source.name)
    placeholder.meta["value"] = source.meta.get("value")
    return placeholder
