"""Run a stage's forward again in the backward for its outputs, instead of saving them.

    before: 0F 1F 2F | 2RECOMPUTE 2B 1RECOMPUTE 1B 0B
    after:  0F 1F 2F | 1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B 0B

A recompute rebuilds what a stage computes inside from its inputs, and those are saved: one value a
stage. A rerun rebuilds the inputs too, from the inputs of the stage before. It costs one more
forward of that stage, and nothing is saved for it.

Of stages in a row each takes what the one before returns, so a row saves what its first is given:

    1RERUN 2RERUN 3RECOMPUTE 3B 2RECOMPUTE 2B 1RECOMPUTE 1B

What a row returns is on the device until its backwards have read it.

What is not computed again:

- outputs of a stage that changes something in place;
- outputs that more than one stage's backward takes, which would be there for as long anyway;
- outputs that the user gets;
- outputs of a stage that is given what is neither saved nor computed again.

As with `offload_saved`, which values these are depends on the plan and on the forward alone.
"""

from __future__ import annotations

from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.edit import Placeholders, add_item, saved_value, set_saved_values
from megacompile.passes.schedule.differentiate import backward_args
from megacompile.passes.schedule.offload_saved import takers_of
from megacompile.passes.schedule.prefetch import Use, first_node, uses


def insert_reruns(schedule: Schedule) -> Schedule:
    """The schedule in which the outputs of the stages in `plan.rerun` are not saved.

    Args:
        schedule: with its recomputes.
    """
    if schedule.backward is None or not schedule.plan.rerun:
        return schedule
    new = schedule.copy()
    assert new.backward is not None
    dropped: set[str] = set()
    calls = ops.calls_by_stage(new.forward, ops.forward)
    computes = uses(new.backward)
    for stage, outputs in reversed(_not_saved(new).items()):  # the last of a row asks for the rest
        dropped |= {item.name for item in outputs}
        _rerun(new.forward, new.backward, calls[stage.index], stage, outputs, computes)
    return set_saved_values(new, [name for name in new.saved_values if name not in dropped])


def _not_saved(schedule: Schedule) -> dict[Stage, list[fx.Node]]:
    """The stages that are run again, in forward order, and the outputs of each that it is for."""
    graph = schedule.forward
    returned, saved_values = ops.returned(graph)
    saved = set(saved_values)  # now; when a stage runs again, they are there or made again
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
            for _, item in _outputs(calls[stage.index], stage)
            if item in saved
            and item not in returned
            and isinstance(item.meta.get("value"), TensorMeta)
            and len(takers.get(item, ())) == 1
        ]
        if outputs:
            found[stage] = outputs
    return found


def _rerun(
    forward: fx.Graph,
    graph: fx.Graph,
    call: fx.Node,
    stage: Stage,
    outputs: list[fx.Node],
    computes: list[Use],
) -> None:
    """Insert a rerun ahead of the first use of its outputs in the backward.

    Args:
        computes: the uses of the backward in program order; gets the rerun.
    """
    placeholders = Placeholders(graph)
    wanted = {item: found for item in outputs if (found := placeholders.find(item.name))}
    readers = {user for placeholder in wanted.values() for user in placeholder.users}
    at = next((i for i, use in enumerate(computes) if not readers.isdisjoint(use.nodes)), None)
    if at is None:
        return
    args = backward_args(call, stage, tuple(range(len(stage.primals))))
    given = tuple(None if a is None else placeholders.of(saved_value(forward, a)) for a in args)
    rng = None
    if stage.traced.random:
        rng = placeholders.of(ops.calls_by_stage(forward, ops.save_rng)[stage.index])
    with graph.inserting_before(first_node(computes[at])):
        again = ops.call(graph, ops.rerun, stage, (), given, rng, name=f"rr{stage.index}")
        computes.insert(at, Use((again,), ()))
        again.meta["value"] = call.meta["value"][: len(stage.outputs)]
        for k, item in _outputs(call, stage):
            made = add_item(graph, again, k, f"{item.name}_again")
            if item in wanted:
                placeholders.replace(wanted[item], made)


def _outputs(call: fx.Node, stage: Stage) -> list[tuple[int, fx.Node]]:
    return sorted((k, item) for k, item in ops.items(call) if k < len(stage.outputs))
