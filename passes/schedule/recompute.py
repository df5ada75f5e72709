"""Run a stage's forward again in the backward instead of keeping its saved tensors.

    before: 0F 1F 2F | 2B 1B 0B        after: 0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B

A stage that draws random numbers has the generators' state of its forward set again for its
recompute, so that both draw the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from megacompile.ir import ops
from megacompile.ir.nodes import set_args
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.passes.edit import Placeholders, add_item, saved_value, set_saved_values
from megacompile.passes.schedule.differentiate import backward_args


def insert_recompute(schedule: Schedule) -> Schedule:
    """The schedule in which every stage that the plan does not keep is recomputed."""
    if schedule.backward is None:
        return schedule
    new = schedule.copy()
    assert new.backward is not None
    forwards = ops.calls_by_stage(new.forward, ops.forward)
    backwards = ops.calls_by_stage(new.backward, ops.backward)
    again = [
        stage
        for stage in reversed(new.stages)
        if stage.index in backwards and stage.index not in new.plan.keep
    ]
    dropped = _forget(new.forward, [(forwards[stage.index], stage) for stage in again])
    saved_values = [name for name in new.saved_values if name not in dropped]
    edit = _Edit(new.forward, new.backward)
    for stage in again:
        if stage.traced.saved:
            saved_values += edit.recompute(forwards[stage.index], backwards[stage.index], stage)
    return set_saved_values(new, list(dict.fromkeys(saved_values)))


def _forget(graph: fx.Graph, calls: Sequence[tuple[fx.Node, Stage]]) -> set[str]:
    """Stop forwards from returning saved tensors; returns the names they had."""
    dropped: dict[fx.Node, None] = {}
    for call, stage in calls:
        results = stage.result_count
        set_args(call, (*call.args[:3], False))
        call.meta["value"] = call.meta["value"][:results]
        dropped |= {item: None for k, item in ops.items(call) if k >= results}
    output = graph.output_node()
    outputs, kept = ops.returned(graph)
    set_args(output, ((outputs, tuple(n for n in kept if n not in dropped)),))  # once: it is long
    for item in dropped:
        graph.erase_node(item)
    return {item.name for item in dropped}


class _Edit:
    """Inserts recomputes."""

    def __init__(self, forward: fx.Graph, backward: fx.Graph) -> None:
        self.forward = forward
        self.backward = backward
        self.states = ops.calls_by_stage(forward, ops.save_rng)
        self.placeholders = Placeholders(backward)

    def recompute(self, call: fx.Node, backward: fx.Node, stage: Stage) -> list[str]:
        """Insert a recompute before a backward; returns the saved values it takes."""
        args: list[fx.Node | None] = []
        taken: list[str] = []
        for arg in backward_args(call, stage, stage.traced.recompute_primals):
            source = None if arg is None else saved_value(self.forward, arg)
            args.append(None if source is None else self.placeholders.of(source))
            taken += [] if source is None else [source.name]
        rng = None
        if stage.traced.random:
            rng = self.placeholders.of(self.states[stage.index])
            taken.append(self.states[stage.index].name)
        graph, saved = self.backward, ops.arguments(backward)[3]
        with graph.inserting_before(backward):
            name = f"rc{stage.index}"
            again = ops.call(graph, ops.recompute, stage, (), tuple(args), rng, name=name)
            again.meta["value"] = stage.saved_values
            for k, placeholder in enumerate(saved):
                item = add_item(graph, again, k, f"{placeholder.name}_again")
                self.placeholders.replace(placeholder, item)
        return taken
