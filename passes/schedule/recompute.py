"""Run a stage's forward again in the backward instead of keeping its saved tensors.

    before: 0F 1F 2F | 2B 1B 0B        after: 0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B

A stage that draws random numbers has the generators' state of its forward set again for its
recompute, so that both draw the same.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    stages = [s for s in reversed(new.stages) if s.index in backwards]
    stages = [s for s in stages if s.index not in new.plan.keep]
    dropped = _forget(new.forward, [(forwards[s.index], s) for s in stages])
    saved_values = [name for name in new.saved_values if name not in dropped]
    inputs = _Placeholders(new.backward)
    for stage in stages:
        if stage.traced.saved:
            call, backward = forwards[stage.index], backwards[stage.index]
            saved_values += _recompute(new.forward, inputs, call, backward, stage)
    return add_saved_values(new, list(dict.fromkeys(saved_values)))


def _forget(graph: fx.Graph, calls: Sequence[tuple[fx.Node, Stage]]) -> set[str]:
    """Stop forwards from returning saved tensors; gives the names they had."""
    dropped: dict[fx.Node, None] = {}
    for call, stage in calls:
        results = len(stage.outputs) + len(stage.mutated)
        call.args = (*call.args[:3], False)
        call.meta["value"] = call.meta["value"][:results]
        dropped |= dict.fromkeys(item for k, item in ops.items(call) if k >= results)
    output = graph.output_node()
    outputs, kept = ops.returned(graph)
    output.args = ((outputs, tuple(n for n in kept if n not in dropped)),)
    for item in dropped:
        graph.erase_node(item)
    return {item.name for item in dropped}


class _Placeholders:
    """A backward's placeholders for saved values, made where there are none; those come first."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        existing = graph.find_nodes(op="placeholder")
        self.by_name: dict[str, fx.Node] = {node.name: node for node in existing}
        self._first: fx.Node = existing[0]

    def of(self, source: fx.Node) -> fx.Node:
        """The placeholder for a value of the forward."""
        if source.name not in self.by_name:
            with self.graph.inserting_before(self._first):
                self._first = self.graph.placeholder(source.name)
            self._first.meta["value"] = source.meta.get("value")
            self.by_name[source.name] = self._first
        return self.by_name[source.name]

    def replace(self, placeholder: fx.Node, value: fx.Node) -> None:
        """Nobody takes a placeholder any more."""
        placeholder.replace_all_uses_with(value)
        if placeholder is self._first:
            self._first = placeholder.next
        del self.by_name[placeholder.name]
        self.graph.erase_node(placeholder)


def _recompute(
    forward: fx.Graph, inputs: _Placeholders, call: fx.Node, backward: fx.Node, stage: Stage
) -> list[str]:
    """Insert a recompute before a backward; gives the saved values it takes."""
    args: list[fx.Node | None] = []
    taken: list[str] = []
    for arg in backward_args(call, stage, stage.traced.recompute_primals):
        if arg is None:
            args.append(None)
            continue
        source = saved_value(forward, arg)
        taken.append(source.name)
        args.append(inputs.of(source))
    rng = None
    if stage.traced.random:
        taken.append(f"rng{stage.index}")
        rng = inputs.of(next(n for n in forward.nodes if n.name == taken[-1]))
    placeholders = ops.arguments(backward)[3]
    graph = inputs.graph
    with graph.inserting_before(backward):
        name = f"rc{stage.index}"
        again = ops.call(graph, ops.recompute, stage, (), tuple(args), rng, name=name)
        again.meta["value"] = stage.traced.saved
        for k, placeholder in enumerate(placeholders):
            item = add_item(graph, again, k, f"{placeholder.name}_again")
            inputs.replace(placeholder, item)
    return taken
