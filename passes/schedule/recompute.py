"""Runs a stage's forward again in the backward instead of keeping its results.

    before:  0F 1F 2F | 2B 1B 0B
    after:   0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B            its saved tensors
    or:      0F 1F 2F | 1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B 0B     its outputs too

For a stage with random numbers, the generator state of its forward is restored, so that both draw
the same numbers.
"""

from __future__ import annotations

from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.edit import (
    Placeholders,
    add_item,
    copied,
    saved_value,
    set_saved_values,
)
from megacompile.passes.schedule.differentiate import backward_args, forget_saved_tensors
from megacompile.passes.schedule.offload_saved import takers_of
from megacompile.passes.schedule.prefetch import Use, first_node, uses


def insert_recompute(schedule: Schedule) -> Schedule:
    """Recompute every stage that the plan does not keep."""
    if schedule.backward is None:
        return schedule
    new, graph = copied(schedule)
    forwards = ops.calls_by_stage(new.forward, ops.forward)
    backwards = ops.calls_by_stage(graph, ops.backward)
    again = [
        stage
        for stage in reversed(new.stages)
        if stage.index in backwards and stage.index not in new.plan.keep
    ]
    dropped = forget_saved_tensors(new.forward, [(forwards[stage.index], stage) for stage in again])
    saved_values = [name for name in new.saved_values if name not in dropped]
    placeholders = Placeholders(graph)
    for stage in again:
        if stage.traced.saved:
            call, primals = forwards[stage.index], stage.traced.recompute_primals
            args, rng = _inputs(call, stage, primals, placeholders)
            backward = backwards[stage.index]
            with graph.inserting_before(backward):
                name = f"rc{stage.index}"
                made = ops.call(graph, ops.recompute, stage, (), args, rng, name=name)
                made.meta["value"] = stage.saved_values
                for k, placeholder in enumerate(ops.arguments(backward)[3]):
                    item = add_item(graph, made, k, f"{placeholder.name}_again")
                    placeholders.replace(placeholder, item)
            saved_values += [str(node.target) for node in (*args, rng) if node is not None]
    return set_saved_values(new, list(dict.fromkeys(saved_values)))


def _inputs(
    call: fx.Node, stage: Stage, primals: tuple[int, ...], placeholders: Placeholders
) -> tuple[tuple[fx.Node | None, ...], fx.Node | None]:
    """Placeholders, named like the saved values, for the arguments among `primals` as the forward
    read them, and for the random state if there is one."""
    args = tuple(
        None if arg is None else placeholders.of(saved_value(call.graph, arg))
        for arg in backward_args(call, stage, primals)
    )
    states = ops.calls_by_stage(call.graph, ops.save_rng) if stage.traced.random else {}
    return args, placeholders.of(states[stage.index]) if states else None


# Reruns.


def insert_reruns(schedule: Schedule) -> Schedule:
    """Rerun the stages in `plan.rerun` instead of saving their outputs, in a schedule with its
    recomputes.

        1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B

    A rerun rebuilds the saved inputs of the next stage from those of its own. It costs one more
    forward of that stage, and saves nothing for it. Outputs are not rebuilt if the stage changes
    something in place or has an input that is neither saved nor rebuilt, if several stages'
    backwards take them, or if they are returned to the user. As in `offload_saved`, the choice of
    values depends only on the plan and the forward.
    """
    if schedule.backward is None or not schedule.plan.rerun:
        return schedule
    new, graph = copied(schedule)
    dropped: set[str] = set()
    calls = ops.calls_by_stage(new.forward, ops.forward)
    computes, placeholders = uses(graph), Placeholders(graph)
    # reversed: later reruns take the outputs of earlier ones
    for stage, outputs in reversed(_not_saved(new).items()):
        dropped |= {item.name for item in outputs}
        _rerun(calls[stage.index], stage, outputs, computes, placeholders)
    return set_saved_values(new, [name for name in new.saved_values if name not in dropped])


def _not_saved(schedule: Schedule) -> dict[Stage, list[fx.Node]]:
    """The stages to rerun, in forward order, with the outputs that are rebuilt."""
    graph = schedule.forward
    returned, saved_values = ops.returned(graph)
    saved = set(saved_values)  # by the time of a rerun these are available or rebuilt
    takers = takers_of(schedule, saved)
    calls = ops.calls_by_stage(graph, ops.forward)
    found: dict[Stage, list[fx.Node]] = {}
    for stage in schedule.stages:
        if stage.index not in schedule.plan.rerun or stage.mutated:
            continue
        given = {saved_value(graph, arg) for arg in ops.arguments(calls[stage.index])[2]}
        if not given <= saved:
            continue
        outputs = [
            item
            for k, item in ops.items(calls[stage.index])
            if k < len(stage.outputs)
            and item in saved
            and item not in returned
            and isinstance(item.meta.get("value"), TensorMeta)
            and len(takers.get(item, ())) == 1
        ]
        if outputs:
            found[stage] = outputs
    return found


def _rerun(
    call: fx.Node,
    stage: Stage,
    outputs: list[fx.Node],
    computes: list[Use],
    placeholders: Placeholders,
) -> None:
    """Insert a rerun ahead of the first use of its outputs in the backward, and into `computes`,
    the uses of the backward in program order."""
    graph = placeholders.graph
    wanted = {item: found for item in outputs if (found := placeholders.by_name.get(item.name))}
    readers = {user for placeholder in wanted.values() for user in placeholder.users}
    at = next((i for i, use in enumerate(computes) if not readers.isdisjoint(use.nodes)), None)
    if at is None:
        return
    args, rng = _inputs(call, stage, tuple(range(len(stage.primals))), placeholders)
    with graph.inserting_before(first_node(computes[at])):
        again = ops.call(graph, ops.rerun, stage, (), args, rng, name=f"rr{stage.index}")
        computes.insert(at, Use((again,), ()))
        again.meta["value"] = call.meta["value"][: len(stage.outputs)]
        for k, item in sorted((k, item) for k, item in ops.items(call) if k < len(stage.outputs)):
            made = add_item(graph, again, k, f"{item.name}_again")
            if item in wanted:
                placeholders.replace(wanted[item], made)
