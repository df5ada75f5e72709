"""Saved values that the backward computes again, or that wait on the host.

`insert_recompute` and `insert_reruns` run a stage's forward again in the backward.

    before:  0F 1F 2F | 2B 1B 0B
    after:   0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B            its saved tensors
    or:      0F 1F 2F | 1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B 0B     its outputs too

For a stage with random numbers, the generator state of its forward is restored, so that both draw
the same numbers.

`offload_saved_tensors` offloads a stage's saved values to the host until its backward.

    before: 0F 1F 2F 3F
            3B 2RECOMPUTE 2B 1RECOMPUTE 1B
    after:  0F 1OFFLOAD_SAVED 1F 2OFFLOAD_SAVED 2F 3F
            2FETCH_SAVED 3B 2RECOMPUTE 1FETCH_SAVED 2B 1RECOMPUTE 1B

A value is copied once, as soon as it is made; `free` releases its device memory after the copy and
the forward's last reader. In the backward it is fetched `lookahead` stages before its first use.

These values stay on the device: those that a stage outside `plan.offload` takes too; inputs of the
graph and outputs to the user, which are alive anyway; saved tensors that share memory with a value
that stays; and generator states, which are on the host already. The choice depends only on the plan
and the forward, so a backward for other outputs finds them under the same names.
"""

from __future__ import annotations

from torch import fx

from megacompile.cost.ops import analysis_of
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Stage
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.values import producer
from megacompile.passes import edit
from megacompile.passes.schedule.differentiate import backward_args, forget_saved_tensors
from megacompile.passes.schedule.prefetch import Use, first_node, uses


def insert_recompute(schedule: Schedule) -> Schedule:
    """Recompute every stage that the plan does not keep."""
    if schedule.backward is None:
        return schedule
    new, graph = edit.copied(schedule)
    forwards = ops.calls_by_stage(new.forward, ops.forward)
    backwards = ops.calls_by_stage(graph, ops.backward)
    again = [
        stage
        for stage in reversed(new.stages)
        if stage.index in backwards and stage.index not in new.plan.keep
    ]
    dropped = forget_saved_tensors(new.forward, [(forwards[stage.index], stage) for stage in again])
    saved_values = [name for name in new.saved_values if name not in dropped]
    placeholders = edit.Placeholders(graph)
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
                    item = edit.add_item(graph, made, k, f"{placeholder.name}_again")
                    placeholders.replace(placeholder, item)
            saved_values += [str(node.target) for node in (*args, rng) if node is not None]
    return edit.set_saved_values(new, list(dict.fromkeys(saved_values)))


def _inputs(
    call: fx.Node, stage: Stage, primals: tuple[int, ...], placeholders: edit.Placeholders
) -> tuple[tuple[fx.Node | None, ...], fx.Node | None]:
    """Placeholders, named like the saved values, for the arguments among `primals` as the forward
    read them, and for the random state if there is one."""
    args = tuple(
        None if arg is None else placeholders.of(edit.saved_value(call.graph, arg))
        for arg in backward_args(call, stage, primals)
    )
    states = ops.calls_by_stage(call.graph, ops.save_rng) if stage.traced.random else {}
    return args, placeholders.of(states[stage.index]) if states else None


def insert_reruns(schedule: Schedule) -> Schedule:
    """Rerun the stages in `plan.rerun` instead of saving their outputs, in a schedule with its
    recomputes.

        1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B

    A rerun rebuilds the saved inputs of the next stage from those of its own. It costs one more
    forward of its stage and keeps none of that stage's saved tensors. Outputs are not rebuilt if
    the stage changes something in place or has an input that is neither saved nor rebuilt, if
    several stages' backwards take them, or if they are returned to the user. As in
    `offload_saved_tensors`, the choice of values depends only on the plan and the forward.
    """
    if schedule.backward is None or not schedule.plan.rerun:
        return schedule
    new, graph = edit.copied(schedule)
    dropped: set[str] = set()
    calls = ops.calls_by_stage(new.forward, ops.forward)
    computes, placeholders = uses(graph), edit.Placeholders(graph)
    # reversed: later reruns take the outputs of earlier ones
    for stage, outputs in reversed(_not_saved(new).items()):
        dropped |= {item.name for item in outputs}
        by_name, call = placeholders.by_name, calls[stage.index]
        wanted = {item: by_name[item.name] for item in outputs if item.name in by_name}
        readers = {user for placeholder in wanted.values() for user in placeholder.users}
        at = next((i for i, use in enumerate(computes) if not readers.isdisjoint(use.nodes)), None)
        if at is None:
            continue
        args, rng = _inputs(call, stage, tuple(range(len(stage.primals))), placeholders)
        with graph.inserting_before(first_node(computes[at])):
            again = ops.call(graph, ops.rerun, stage, (), args, rng, name=f"rr{stage.index}")
            computes.insert(at, Use((again,), ()))
            again.meta["value"] = call.meta["value"][: len(stage.outputs)]
            for k, item in sorted((k, n) for k, n in ops.items(call) if k < len(stage.outputs)):
                made = edit.add_item(graph, again, k, f"{item.name}_again")
                if item in wanted:
                    placeholders.replace(wanted[item], made)
    return edit.set_saved_values(new, [name for name in new.saved_values if name not in dropped])


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
        given = {edit.saved_value(graph, arg) for arg in ops.arguments(calls[stage.index])[2]}
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


def offload_saved_tensors(schedule: Schedule, *, lookahead: int = 1) -> Schedule:
    """Offload the saved values of the stages in `plan.offload`, after `insert_recompute`. A value
    is fetched `lookahead` stages before its first use."""
    if schedule.backward is None or not schedule.plan.offload:
        return schedule
    new, graph = edit.copied(schedule)
    names: dict[str, tuple[Stage, str]] = {}  # saved value -> its stage, its name on the host
    for value, stage in _waiting(new).items():
        op = producer(value)
        with new.forward.inserting_after(max(value, edit.last_item(op))):
            copy = ops.call(new.forward, ops.offload_saved, stage, value, name=f"{value.name}_host")
        copy.meta["value"] = value.meta["value"]
        names[value.name] = stage, copy.name
    _fetch(graph, names, lookahead)
    return edit.set_saved_values(new, [names[n][1] if n in names else n for n in new.saved_values])


def _waiting(schedule: Schedule) -> dict[fx.Node, Stage]:
    """The saved values to offload, each with the first stage whose backward needs it."""
    outputs, saved_values = ops.returned(schedule.forward)
    kept = {node for node in outputs if isinstance(node, fx.Node)}
    takers = takers_of(schedule, set(saved_values))
    waiting = {
        value: max(takers[value], key=lambda stage: stage.index)
        for value in saved_values
        if value.op != "placeholder"
        and value not in kept
        and isinstance(value.meta.get("value"), TensorMeta)
        and {stage.index for stage in takers.get(value, ())} <= schedule.plan.offload
        and takers.get(value)
    }
    staying = {*kept, *saved_values, *schedule.forward.find_nodes(op="placeholder")}
    staying -= waiting.keys()
    calls = ops.calls_by_stage(schedule.forward, ops.forward)
    for stage in schedule.stages:
        if stage.index not in schedule.plan.keep & schedule.plan.offload:
            continue
        call = calls[stage.index]
        places = analysis_of(stage.traced, ops.code_of(call), fused=True).returned
        sharing: dict[int, list[fx.Node]] = {}  # saved values in the same memory
        for k, item in ops.items(call):
            place = places[k] if k < len(places) else None
            if place is not None:
                sharing.setdefault(place.memory, []).append(item)
        for at, items in sharing.items():
            ref = stage.primals[-1 - at] if at < 0 else None
            given = [ops.arguments(call)[2][ref.index]] if isinstance(ref, ArgRef) else []
            if staying.intersection((*items, *given)):  # with a value that stays
                for item in items:
                    waiting.pop(item, None)
    return waiting


def takers_of(schedule: Schedule, saved_values: set[fx.Node]) -> dict[fx.Node, list[Stage]]:
    """For each saved value, the stages whose backward may take it, for any outputs."""
    graph = schedule.forward
    takers: dict[fx.Node, list[Stage]] = {}
    calls = ops.calls_by_stage(graph, ops.forward)
    for stage in schedule.stages:
        call = calls[stage.index]
        count = stage.result_count
        if not any(meta.requires_grad for meta in call.meta["value"][:count]):
            continue  # no output has a backward
        found = [edit.value_that_is_saved(arg) for arg in ops.arguments(call)[2]]
        found += [item for k, item in ops.items(call) if k >= count]  # its saved tensors
        for value in dict.fromkeys(found):
            if value in saved_values:
                takers.setdefault(value, []).append(stage)
    return takers


def _fetch(graph: fx.Graph, names: dict[str, tuple[Stage, str]], lookahead: int) -> None:
    """Fetch values ahead of their first readers, in the order of use."""
    steps = uses(graph)
    step_of = {node: i for i, step in enumerate(steps) for node in step.nodes}
    placeholders: list[fx.Node] = graph.find_nodes(op="placeholder")
    wanted = []
    for node in placeholders:
        if node.name in names:
            readers = [step_of[user] for user in node.users if user in step_of]
            if readers:
                wanted.append((min(readers), node))
    for at, node in sorted(wanted, key=lambda pair: pair[0]):
        stage, name = names[node.name]
        with graph.inserting_before(node):
            on_host = graph.placeholder(name)
        with graph.inserting_before(steps[max(0, at - lookahead)].nodes[0]):
            buffer = ops.call(graph, ops.alloc_saved, stage, on_host, name=f"{node.name}_buf")
            back = ops.call(
                graph, ops.fetch_saved, stage, on_host, buffer, name=f"{node.name}_back"
            )
        for added in (on_host, buffer, back):
            added.meta["value"] = node.meta.get("value")
        node.replace_all_uses_with(back)
        graph.erase_node(node)
